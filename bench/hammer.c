/* A keep-alive HTTP/1.1 client that costs next to nothing: it sends the requests of a file over and over.
 *
 *     hammer HOST PORT CONNECTIONS SECONDS FILE [RATE]
 *
 * FILE holds whole requests, each behind its length as a little-endian 32-bit number. Every connection has one
 * request under way at a time; with RATE they send so many a second in all, else as fast as answers come. Prints one
 * line of JSON. Knows answers with Content-Length only, on purpose.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_BYTES 16384

struct connection {
    int fd;
    size_t filled;          /* bytes of the answer read so far */
    uint64_t sent_ns;       /* when the request under way was written */
    char answer[ANSWER_BYTES + 1];
};

static char *file;          /* the whole file; requests point into it */
static char **requests;
static uint32_t *sizes;
static size_t request_count, next_request;
static uint32_t *latencies_us;
static size_t latency_room = 1 << 22, answered, refused;

static struct connection **idle; /* answered, and not yet due again */
static size_t idle_count;
static uint64_t interval_ns, due_ns;

static void die(const char *what) { perror(what); exit(1); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static void load(const char *path) {
    FILE *in = fopen(path, "rb");
    if (!in) die(path);
    fseek(in, 0, SEEK_END);
    size_t size = ftell(in), at = 0;
    rewind(in);
    file = malloc(size);
    if (fread(file, 1, size, in) != size) die("read");
    fclose(in);
    requests = malloc(size / 4 * sizeof *requests);
    sizes = malloc(size / 4 * sizeof *sizes);
    while (at + 4 <= size) {
        memcpy(&sizes[request_count], file + at, 4);
        requests[request_count] = file + at + 4;
        at += 4 + sizes[request_count++];
    }
}

static void send_next(struct connection *c) {
    size_t r = next_request++ % request_count;
    c->filled = 0;
    c->sent_ns = now_ns();
    if (send(c->fd, requests[r], sizes[r], MSG_NOSIGNAL) != (ssize_t)sizes[r]) die("send");
}

/* With a rate: sends what is due by now, as far as connections are free. */
static void send_due(uint64_t now) {
    while (idle_count && due_ns <= now) {
        send_next(idle[--idle_count]);
        due_ns += interval_ns;
    }
}

static void go_on(struct connection *c) {
    if (interval_ns) idle[idle_count++] = c;
    else send_next(c);
}

/* Bytes of the answer in the buffer, or 0 while it isn't whole. */
static size_t whole_answer(struct connection *c) {
    c->answer[c->filled] = 0;
    char *end = strstr(c->answer, "\r\n\r\n");
    if (!end) return 0;
    char *length = strcasestr(c->answer, "\r\ncontent-length:");
    size_t whole = end + 4 - c->answer + (length && length < end ? strtoul(length + 17, NULL, 10) : 0);
    return c->filled >= whole ? whole : 0;
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    if (argc < 6 || argc > 7) { fprintf(stderr, "hammer HOST PORT CONNECTIONS SECONDS FILE [RATE]\n"); return 2; }
    int count = atoi(argv[3]), epoll = epoll_create1(0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2]))};
    if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) die("address");
    load(argv[5]);
    latencies_us = malloc(latency_room * sizeof *latencies_us);
    struct connection *connections = calloc(count, sizeof *connections);
    idle = calloc(count, sizeof *idle);
    if (argc == 7) interval_ns = (uint64_t)(1e9 / atof(argv[6]));
    uint64_t start = now_ns(), stop = start + (uint64_t)(atof(argv[4]) * 1e9);
    for (int i = 0; i < count; i++) {
        struct connection *c = &connections[i];
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event);
        go_on(c);
    }
    struct epoll_event events[256];
    uint64_t now = start;
    due_ns = now_ns();
    while (now < stop) {
        send_due(now);
        int ready = epoll_wait(epoll, events, 256, interval_ns ? 1 : 100);
        if (ready < 0 && errno != EINTR) die("epoll_wait");
        now = now_ns();
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            ssize_t got = recv(c->fd, c->answer + c->filled, ANSWER_BYTES - c->filled, 0);
            if (got <= 0) { fprintf(stderr, "the server closed a connection\n"); return 1; }
            c->filled += got;
            if (!whole_answer(c)) continue;
            if (strncmp(c->answer + 9, "200", 3)) {
                if (!refused++) fprintf(stderr, "%s\n", c->answer);
            }
            if (answered < latency_room) latencies_us[answered] = (now_ns() - c->sent_ns) / 1000;
            answered++;
            go_on(c);
        }
    }
    double seconds = (now - start) / 1e9;
    size_t kept = answered < latency_room ? answered : latency_room;
    qsort(latencies_us, kept, sizeof *latencies_us, by_size);
    printf("{\"requests\": %zu, \"refused\": %zu, \"seconds\": %.3f, \"p50_us\": %u, \"p99_us\": %u}\n", answered,
           refused, seconds, kept ? latencies_us[kept / 2] : 0, kept ? latencies_us[kept * 99 / 100] : 0);
    return 0;
}
