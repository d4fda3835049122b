/* An HTTP/1.1 client that costs next to nothing: it sends the requests of a file over and over.
 *
 *     hammer HOST PORT CONNECTIONS SECONDS FILE [RATE] [each] [split]
 *
 * FILE holds whole requests, each after its length as a little-endian 32-bit number. Every connection has one request
 * under way at a time; with RATE they send that many a second in all (0: as fast as answers come). `each`: a connection
 * for each request, as PHP does it. `split`: head and body are a packet each, sent one after the other as libraries do;
 * the body after 100 Continue where the head asks for it. Prints one line of JSON. Understands answers with
 * Content-Length only, on purpose. With RATE, latency counts from the moment at which a request was due. BENCH_TLS=1:
 * over TLS (stream.h); connections of one request resume the session of the first.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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
#include "stream.h"

enum { ANSWER_BYTES = 16384 };

struct connection {
    struct stream stream;
    int connecting, shaking;
    size_t filled;          /* bytes of the answer read so far */
    uint64_t sent_ns;       /* when the request under way was written, or due */
    char *rest;             /* of the request under way, to be sent after 100 Continue, and its size */
    size_t rest_size;
    char answer[ANSWER_BYTES + 1];
};

static char *file;          /* the whole file; requests point into it */
static char **requests;
static uint32_t *sizes;
static size_t request_count, next_request;
static uint32_t *latencies_us;
static size_t latency_room = 1 << 22, answered, refused, broken;

static struct connection **idle; /* answered, and not yet due again */
static size_t idle_count;
static uint64_t interval_ns, due_ns;
static int epoll, connection_each, split;
static struct sockaddr_in address = {.sin_family = AF_INET};

static void die(const char *what) { perror(what); exit(1); }

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static void load(const char *path)
{
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

static void watch(struct connection *c, int how, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(epoll, how, c->stream.fd, &event);
}

static void open_connection(struct connection *c)
{
    c->stream.fd = socket(AF_INET, SOCK_STREAM | (connection_each ? SOCK_NONBLOCK : 0), 0);
    if (c->stream.fd < 0) die("socket");
    setsockopt(c->stream.fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    c->connecting = connection_each;
    if (connect(c->stream.fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) die("connect");
    if (!connection_each) {
        /* Blocking: handshakes are over before the clock starts. */
        if (stream_shake(&c->stream) != 1) die("TLS handshake");
        fcntl(c->stream.fd, F_SETFL, O_NONBLOCK);
    }
    watch(c, EPOLL_CTL_ADD, connection_each ? EPOLLOUT : EPOLLIN);
}

static void write_all(struct connection *c, const char *at, size_t size)
{
    while (size) {
        ssize_t now = stream_send(&c->stream, at, size);
        if (now < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (now <= 0) die("send");
        at += now;
        size -= now;
    }
}

static void write_request(struct connection *c)
{
    size_t r = next_request++ % request_count, first = sizes[r];
    char *end = split ? memmem(requests[r], sizes[r], "\r\n\r\n", 4) : NULL;
    c->rest_size = 0;
    if (end) first = end + 4 - requests[r];
    write_all(c, requests[r], first);
    if (end && memmem(requests[r], first, "100-continue", 12)) {
        c->rest = requests[r] + first;
        c->rest_size = sizes[r] - first;
    } else {
        write_all(c, requests[r] + first, sizes[r] - first);
    }
}

/* `since`: from when on the request counts as waiting. */
static void send_next(struct connection *c, uint64_t since)
{
    c->filled = 0;
    c->sent_ns = since;
    if (connection_each) open_connection(c);
    else write_request(c);
}

/* With a rate: sends what is due by now, as far as connections are free. */
static void send_due(uint64_t now)
{
    while (idle_count && due_ns <= now) {
        send_next(idle[--idle_count], due_ns);
        due_ns += interval_ns;
    }
}

static void go_on(struct connection *c)
{
    if (interval_ns) idle[idle_count++] = c;
    else send_next(c, now_ns());
}

/* Bytes of the answer in the buffer, or 0 while it isn't whole. */
static size_t whole_answer(struct connection *c)
{
    c->answer[c->filled] = 0;
    char *end = strstr(c->answer, "\r\n\r\n");
    if (!end) return 0;
    char *length = strcasestr(c->answer, "\r\ncontent-length:");
    if (!strncmp(c->answer + 9, "100", 3)) {
        /* The answer follows. */
        c->filled -= end + 4 - c->answer;
        memmove(c->answer, end + 4, c->filled);
        write_all(c, c->rest, c->rest_size);
        c->rest_size = 0;
        return whole_answer(c);
    }
    size_t whole = end + 4 - c->answer + (length && length < end ? strtoul(length + 17, NULL, 10) : 0);
    return c->filled >= whole ? whole : 0;
}

static int by_size(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    if (argc < 6) { fprintf(stderr, "hammer HOST PORT CONNECTIONS SECONDS FILE [RATE] [each] [split]\n"); return 2; }
    int count = atoi(argv[3]);
    epoll = epoll_create1(0);
    address.sin_port = htons(atoi(argv[2]));
    if (inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) die("address");
    load(argv[5]);
    if (argc > 6 && atof(argv[6]) > 0) interval_ns = (uint64_t)(1e9 / atof(argv[6]));
    for (int i = 7; i < argc; i++) {
        if (!strcmp(argv[i], "each")) connection_each = 1;
        if (!strcmp(argv[i], "split")) split = 1;
    }
    stream_begin();
    stream_resumes = connection_each;
    latencies_us = malloc(latency_room * sizeof *latencies_us);
    struct connection *connections = calloc(count, sizeof *connections);
    idle = calloc(count, sizeof *idle);
    if (!connection_each)
        for (int i = 0; i < count; i++) open_connection(&connections[i]);
    uint64_t start = now_ns(), stop = start + (uint64_t)(atof(argv[4]) * 1e9), now = start;
    due_ns = start;
    for (int i = 0; i < count; i++) go_on(&connections[i]);
    struct epoll_event events[256];
    while (now < stop) {
        send_due(now);
        int ready = epoll_wait(epoll, events, 256, interval_ns ? 1 : 100);
        if (ready < 0 && errno != EINTR) die("epoll_wait");
        now = now_ns();
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            if (c->connecting) {
                int fault = 0;
                socklen_t size = sizeof fault;
                getsockopt(c->stream.fd, SOL_SOCKET, SO_ERROR, &fault, &size);
                if (fault) { errno = fault; die("connect"); }
                c->connecting = 0;
                c->shaking = 1;
                watch(c, EPOLL_CTL_MOD, EPOLLIN);
            }
            if (c->shaking) {
                int shaken = stream_shake(&c->stream);
                if (shaken < 0) die("TLS handshake");
                if (!shaken) continue;
                c->shaking = 0;
                write_request(c);
                continue;
            }
            ssize_t got = stream_recv(&c->stream, c->answer + c->filled, ANSWER_BYTES - c->filled);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0) {
                if (!broken++) fprintf(stderr, "the server closed a connection without an answer\n");
                stream_close(&c->stream);
                if (!connection_each) return 1;
                go_on(c);
                continue;
            }
            c->filled += got;
            if (!whole_answer(c)) continue;
            if (strncmp(c->answer + 9, "200", 3)) {
                if (!refused++) fprintf(stderr, "%s\n", c->answer);
            }
            if (answered < latency_room) latencies_us[answered] = (now_ns() - c->sent_ns) / 1000;
            answered++;
            if (connection_each) stream_close(&c->stream);
            go_on(c);
        }
    }
    double seconds = (now - start) / 1e9;
    size_t samples = answered < latency_room ? answered : latency_room;
    qsort(latencies_us, samples, sizeof *latencies_us, by_size);
    printf("{\"requests\": %zu, \"refused\": %zu, \"seconds\": %.3f, \"p50_us\": %u, \"p99_us\": %u}\n", answered,
           refused + broken, seconds, samples ? latencies_us[samples / 2] : 0, samples ? latencies_us[samples * 99 / 100] : 0);
    return 0;
}
