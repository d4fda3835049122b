/* Many Pusher clients in one process: epoll, one thread, 16 bytes and a descriptor for a connection (with TLS more).
 * bench/load/million.py builds it and starts several.
 *
 *   crowd HOST PORT KEY FIRST COUNT AT_ONCE CHANNEL ADDRESS...
 *
 * Connection i of COUNT comes from ADDRESS number (FIRST + i), in turn, and subscribes to CHANNEL; a * in it becomes
 * FIRST + i. AT_ONCE handshakes are under way at a time. Commands on stdin, one a line:
 *
 *   come     from now on every connection that is missing is opened: at once, a second after it was lost, 0.1 s after an
 *            attempt failed
 *   leave    reset all connections, and open none until `come`
 *   cut      reset all connections; a second later they begin to come back
 *   end      (or the end of stdin) exit
 *
 * While all connections are there it reads every 10 ms, not at each message: clients on other machines would not take
 * turns with the server on its processors.
 *
 * Four times a second prints a line of JSON: open, ready, ready_at, failed, lost, messages, and what was added since the
 * line before to the histograms connect, back (since the last cut or leave) and latency. An event's latency counts from
 * the CLOCK_MONOTONIC seconds in its data, "#channel|number|seconds|". Buckets are those of bench/load/swarm_process.py.
 *
 * With BENCH_TLS=1 the clients speak TLS (stream.h). After a `leave` or `cut` they come back with a session ticket.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "stream.h"

enum { BUCKETS = 640, EVENTS_AT_ONCE = 512, READ_BYTES = 1 << 16, MAX_ADDRESSES = 256, FAULTS = 8 };
enum state { MISSING, CONNECTING, SHAKING, HEAD, SUBSCRIBING, READY };

struct client {
    struct stream stream;
    float due;   /* MISSING: not to be opened before, seconds since the beginning */
    float began; /* of the present attempt */
    uint8_t state;
};

static const double HANDSHAKE_S = 30, REPORT_S = 0.25, LOST_S = 1, RETRY_S = 0.1;
static const struct timespec BETWEEN_READS = {0, 10 * 1000 * 1000};
static const char PONG[] = "\x8a\x80\0\0\0\0";

static struct client *clients;
static int count, first, at_once, under_way, epoll_fd, address_count, coming;
static int open_count, ready_count, place, oldest;
static uint64_t failed, lost, messages, refused;
static double beginning, cut_at, ready_at;
static uint32_t connect_times[BUCKETS], back_times[BUCKETS], latencies[BUCKETS];
static struct sockaddr_in server, sources[MAX_ADDRESSES];
static const char *key, *channel, *host;
static char fault[80];

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void note(uint32_t *histogram, double seconds) {
    double us = seconds * 1e6;
    int bucket = us > 1 ? (int)(log(us) * 20) : 0;
    histogram[bucket < BUCKETS ? bucket : BUCKETS - 1]++;
}

static void watch(int how, int index, uint32_t events) {
    struct epoll_event event = {.events = events, .data.u32 = (uint32_t)index};
    epoll_ctl(epoll_fd, how, clients[index].stream.fd, &event);
}

/* Closes a connection. `ours`: by our decision, with a reset; it counts as neither lost nor failed. */
static void drop(int index, int ours, double now) {
    struct client *c = &clients[index];
    if (c->state == MISSING)
        return;
    if (ours) {
        struct linger reset = {1, 0};
        setsockopt(c->stream.fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    }
    stream_close(&c->stream);
    if (c->state == READY) {
        ready_count--;
        open_count--;
        if (!ours)
            lost++;
    } else {
        under_way--;
        if (!ours)
            failed++;
    }
    c->due = (float)(now - beginning + (ours || c->state == READY ? LOST_S : RETRY_S));
    c->state = MISSING;
}

static void begin(int index, double now) {
    struct client *c = &clients[index];
    int one = 1;
    c->stream.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->stream.fd < 0) {
        snprintf(fault, sizeof fault, "socket: %s", strerror(errno));
        failed++;
        c->due = (float)(now - beginning + RETRY_S);
        return;
    }
    c->state = CONNECTING;
    c->began = (float)(now - beginning);
    under_way++;
    if (address_count) {
        /* The port is chosen in connect(), by the whole pair of addresses. */
        setsockopt(c->stream.fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &one, sizeof one);
        bind(c->stream.fd, (struct sockaddr *)&sources[(first + index) % address_count], sizeof sources[0]);
    }
    if (connect(c->stream.fd, (struct sockaddr *)&server, sizeof server) < 0 && errno != EINPROGRESS) {
        snprintf(fault, sizeof fault, "connect: %s", strerror(errno));
        drop(index, 0, now);
        return;
    }
    watch(EPOLL_CTL_ADD, index, EPOLLOUT);
}

static int send_all(int index, const char *bytes, int size, double now) {
    if (stream_send(&clients[index].stream, bytes, (size_t)size) == size)
        return 1;
    snprintf(fault, sizeof fault, "send: %s", strerror(errno));
    drop(index, 0, now);
    return 0;
}

static void subscribe(int index, double now) {
    char name[256], frame[512], *star;
    int size;
    snprintf(name, sizeof name, "%s", channel);
    star = strchr(name, '*');
    if (star)
        snprintf(star, sizeof name - (size_t)(star - name), "%d%s", first + index, strchr(channel, '*') + 1);
    size = snprintf(frame + 8, sizeof frame - 8, "{\"event\":\"pusher:subscribe\",\"data\":{\"channel\":\"%s\"}}", name);
    if (size < 126) {
        memcpy(frame + 2, (char[]){(char)0x81, (char)(0x80 | size), 0, 0, 0, 0}, 6);
        if (!send_all(index, frame + 2, size + 6, now))
            return;
    } else {
        memcpy(frame, (char[]){(char)0x81, (char)0xfe, (char)(size >> 8), (char)size, 0, 0, 0, 0}, 8);
        if (!send_all(index, frame, size + 8, now))
            return;
    }
    clients[index].state = SUBSCRIBING;
}

static void hear(int index, char *bytes, ssize_t size, double now) {
    struct client *c = &clients[index];
    char *at = bytes, *end = bytes + size, *bar;
    if (c->state == HEAD && memmem(bytes, (size_t)size, "connection_established", 22)) {
        subscribe(index, now);
        return;
    }
    if (c->state == SUBSCRIBING && memmem(bytes, (size_t)size, "subscription_succeeded", 22)) {
        c->state = READY;
        /* Acknowledge at once, while the server's socket is in the processor's cache, and not 40 ms later. */
        setsockopt(c->stream.fd, IPPROTO_TCP, TCP_QUICKACK, &(int){1}, sizeof(int));
        under_way--;
        ready_count++;
        open_count++;
        ready_at = now;
        note(connect_times, now - beginning - c->began);
        if (cut_at > 0)
            note(back_times, now - cut_at);
        return;
    }
    if (c->state != READY) {
        if (memmem(bytes, (size_t)size, "HTTP/1.1 503", 12)) {
            refused++;
            drop(index, 0, now);
        } else if (memmem(bytes, (size_t)size, "pusher:error", 12)) {
            snprintf(fault, sizeof fault, "%.70s", (char *)memmem(bytes, (size_t)size, "pusher:error", 12));
            for (char *b = fault; *b; b++)
                if (*b == '"' || *b == '\\' || *b < ' ')
                    *b = ' ';
            drop(index, 0, now);
        }
        return;
    }
    while ((at = memmem(at, (size_t)(end - at), "\"#", 2))) {
        messages++;
        bar = memchr(at, '|', (size_t)(end - at));
        bar = bar ? memchr(bar + 1, '|', (size_t)(end - bar - 1)) : NULL;
        if (bar)
            note(latencies, now - strtod(bar + 1, NULL));
        at += 2;
    }
    if (size >= 2 && ((uint8_t)bytes[0] == 0x89 || memmem(bytes, (size_t)size, "pusher:ping", 11)))
        send_all(index, PONG, 6, now);
}

static void upgrade(int index, double now) {
    char head[400];
    int length = snprintf(head, sizeof head,
        "GET /app/%s?protocol=7&client=bench&version=1 HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        key, host);
    if (send_all(index, head, length, now)) {
        clients[index].state = HEAD;
        watch(EPOLL_CTL_MOD, index, EPOLLIN | EPOLLET);
    }
}

static void handle(int index, uint32_t events, double now) {
    static char buffer[READ_BYTES + 1];
    struct client *c = &clients[index];
    if (c->state == MISSING)
        return;
    if (c->state == CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->stream.fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) {
            snprintf(fault, sizeof fault, "connect: %s", strerror(error));
            drop(index, 0, now);
            return;
        }
        c->state = SHAKING;
        if (stream_tls)
            watch(EPOLL_CTL_MOD, index, EPOLLIN | EPOLLET);
    }
    if (c->state == SHAKING) {
        int shaken = stream_shake(&c->stream);
        if (shaken < 0) {
            snprintf(fault, sizeof fault, "TLS handshake: %s", strerror(errno));
            drop(index, 0, now);
        } else if (shaken) {
            upgrade(index, now);
        }
        return;
    }
    (void)events;
    /* Edge-triggered: what is left unread isn't reported again. */
    ssize_t size;
    do {
        size = stream_recv(&c->stream, buffer, READ_BYTES);
        if (size > 0) {
            buffer[size] = 0;
            hear(index, buffer, size, now);
        } else if (size == 0 || (errno != EAGAIN && errno != EINTR)) {
            snprintf(fault, sizeof fault, "%s", size == 0 ? "closed by the server" : strerror(errno));
            drop(index, 0, now);
        }
    } while (c->state != MISSING && (size == READ_BYTES || (stream_tls && size > 0) || (size < 0 && errno == EINTR)));
}

static void print_histogram(const char *name, uint32_t *histogram) {
    int some = 0;
    printf(",\"%s\":{", name);
    for (int i = 0; i < BUCKETS; i++)
        if (histogram[i]) {
            printf("%s\"%d\":%u", some++ ? "," : "", i, histogram[i]);
            histogram[i] = 0;
        }
    printf("}");
}

static void report(void) {
    struct rusage used;
    long pages = 0;
    FILE *statm = fopen("/proc/self/statm", "r");
    if (statm) {
        if (fscanf(statm, "%*d %ld", &pages) != 1)
            pages = 0;
        fclose(statm);
    }
    getrusage(RUSAGE_SELF, &used);
    printf("{\"open\":%d,\"ready\":%d,\"ready_at\":%.3f,\"failed\":%llu,\"refused\":%llu,\"lost\":%llu,\"messages\":%llu",
        open_count, ready_count, ready_at, (unsigned long long)failed, (unsigned long long)refused,
        (unsigned long long)lost, (unsigned long long)messages);
    printf(",\"cpu_s\":%.3f,\"rss\":%ld,\"errors\":{", (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec)
        + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6, pages * sysconf(_SC_PAGESIZE));
    if (*fault)
        printf("\"%s\":1", fault);
    printf("}");
    print_histogram("connect", connect_times);
    print_histogram("back", back_times);
    print_histogram("latency", latencies);
    printf("}\n");
    fflush(stdout);
}

static void drop_all(double now) {
    cut_at = now;
    stream_resumes = 1;
    for (int i = 0; i < count; i++)
        drop(i, 1, now);
}

/* Opens missing connections whose time has come, while fewer than `at_once` are under way. */
static void open_some(double now) {
    int looked = 0;
    while (coming && under_way < at_once && ready_count + under_way < count && looked++ < count) {
        if (clients[place].state == MISSING && clients[place].due <= now - beginning) {
            begin(place, now);
            if (looked > 4 * at_once)
                looked = count;
        }
        place = (place + 1) % count;
    }
}

/* Ends handshakes that take too long; looks at a part of the clients at a time. */
static void expire(double now) {
    for (int i = 0; i < count / 16 + 1; i++) {
        struct client *c = &clients[oldest];
        if (c->state != MISSING && c->state != READY && now - beginning - c->began > HANDSHAKE_S) {
            snprintf(fault, sizeof fault, "handshake not complete in 30 s");
            drop(oldest, 0, now);
        }
        oldest = (oldest + 1) % count;
    }
}

int main(int argc, char **argv) {
    struct epoll_event events[EVENTS_AT_ONCE];
    struct rlimit files;
    double reported = 0;
    char line[64];
    int filled = 0, event_count = 0;
    if (argc < 8)
        return 2;
    host = argv[1];
    server.sin_family = AF_INET;
    server.sin_port = htons((uint16_t)atoi(argv[2]));
    inet_pton(AF_INET, argv[1], &server.sin_addr);
    key = argv[3];
    first = atoi(argv[4]);
    count = atoi(argv[5]);
    at_once = atoi(argv[6]);
    channel = argv[7];
    for (int i = 8; i < argc && address_count < MAX_ADDRESSES; i++, address_count++) {
        sources[address_count].sin_family = AF_INET;
        inet_pton(AF_INET, argv[i], &sources[address_count].sin_addr);
    }
    stream_begin();
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    clients = calloc((size_t)count, sizeof *clients);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    fcntl(0, F_SETFL, O_NONBLOCK);
    struct epoll_event commands = {.events = EPOLLIN, .data.u32 = UINT32_MAX};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, 0, &commands);
    beginning = now_s();
    report();
    for (;;) {
        if (ready_count == count && event_count < EVENTS_AT_ONCE)
            nanosleep(&BETWEEN_READS, NULL);
        event_count = epoll_wait(epoll_fd, events, EVENTS_AT_ONCE, coming && ready_count < count ? 5 : 50);
        double now = now_s();
        for (int i = 0; i < event_count; i++) {
            if (events[i].data.u32 != UINT32_MAX) {
                handle((int)events[i].data.u32, events[i].events, now);
                continue;
            }
            ssize_t size = read(0, line + filled, sizeof line - 1 - (size_t)filled);
            if (size == 0)
                return 0;
            if (size < 0)
                continue;
            filled += (int)size;
            line[filled] = 0;
            for (char *end; (end = strchr(line, '\n')); ) {
                *end = 0;
                if (!strcmp(line, "end"))
                    return 0;
                if (!strcmp(line, "come")) {
                    coming = 1;
                    for (int c = 0; c < count; c++)
                        clients[c].due = 0;
                } else if (!strcmp(line, "leave")) {
                    coming = 0;
                    drop_all(now);
                } else if (!strcmp(line, "cut")) {
                    drop_all(now);
                }
                filled -= (int)(end + 1 - line);
                memmove(line, end + 1, (size_t)filled + 1);
            }
            if (filled == (int)sizeof line - 1)
                filled = 0;
        }
        open_some(now);
        if (now - reported >= REPORT_S) {
            reported = now;
            expire(now);
            report();
        }
    }
}
