/* The client of the end-to-end benchmarks: one process, one thread, one epoll. It holds the subscribers, publishes over
 * HTTP what it was given ready and signed, and counts, times and checks each delivery.
 *
 * Not a Pusher client: it knows of JSON only where its own marks stand. Each event's data begins with "#PPNNNNNNNN",
 * publisher and number, and numbers of one publisher must arrive rising at every subscriber.
 *
 * Built and driven by bench/load/end_to_end.py and bench/load/connections.py: commands on stdin, one a line; each is answered by one
 * line of JSON on stdout. Requests come from a file: per request "LENGTH PUBLISHER EVENTS\n" and LENGTH bytes.
 *
 *   connect DIALECT HOST PORT KEY CHANNEL COUNT AT_ONCE
 *                                                 further subscribers, up to COUNT in all; DIALECT: pusher, centrifugo
 *   disconnect
 *   publish HOST PORT FILE                        each publisher: next request when all have the last one
 *   paced HOST PORT FILE RATE                     RATE requests a second, whatever has arrived; latency from the due time
 *   floor COUNT FRAME_BYTES JOINED ROUNDS CORE    the reference: a bare send() loop in a child (on CORE, unless -1),
 *                                                 JOINED frames a send()
 *
 * With BENCH_TLS=1 subscribers speak TLS (stream.h); publishers and the reference don't.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "stream.h"

enum { PUBLISHERS = 16, READ_BYTES = 1 << 18, EVENTS_AT_ONCE = 512, STUCK_S = 15, MARK_BYTES = 11 };

enum state { FREE, CONNECTING, SHAKING, HEAD, GREETED_NEXT, ACCEPTED_NEXT, READY };

struct subscriber {
    struct stream stream;
    enum state state;
    uint32_t partial_bytes, partial_room; /* the start of a frame whose rest has not come */
    char *partial;
    int32_t last[PUBLISHERS]; /* the greatest number seen */
};

struct request {
    char *bytes;
    uint32_t length, events;
    struct request *next;
};

struct publisher {
    int fd;
    struct request *first, *last;
    int waiting_answer;    /* requests sent and not answered: 0 or 1 */
    uint64_t outstanding;  /* deliveries still to come of what was sent */
    uint32_t sent;         /* events sent */
    uint64_t *sent_at_ns;  /* by number */
    uint32_t sent_room;
    char answer[16384];
    uint32_t answer_bytes;
};

static int poller = -1;
static struct subscriber *subscribers;
static uint32_t subscriber_count, ready_count, lost_count;
static struct publisher publishers[PUBLISHERS];
static uint64_t delivered, late, refused, answers;
static char *buffer; /* the start of an incomplete frame, and what is read after it */
static char dialect[16], host[64], key[64], channel[256];
static int centrifugo; /* Centrifugo's own protocol instead of Pusher's, for bench/compare/peers.py */
static struct sockaddr_in address, publish_address;

/* ---- time and latencies: a histogram of microseconds, 64 steps an octave, so within 1.6 % */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
}

static uint64_t histogram[64 * 64];

static void note_latency(uint64_t ns) {
    uint64_t us = ns / 1000;
    if (us < 64) {
        histogram[us]++;
    } else {
        int shift = 57 - __builtin_clzll(us); /* us >> shift lies in 64..127 */
        histogram[64 * shift + (us >> shift)]++;
    }
}

static double latency_ms(double share) {
    uint64_t total = 0, seen = 0;
    for (int i = 0; i < 64 * 64; i++) total += histogram[i];
    for (int i = 0; i < 64 * 64; i++) {
        seen += histogram[i];
        if (total && seen >= share * total) {
            int shift = i < 128 ? 0 : i / 64 - 1;
            return (double)((uint64_t)(i - 64 * shift) << shift) / 1000.0;
        }
    }
    return 0;
}

/* ---- sockets */

static void die(const char *what) {
    fprintf(stderr, "client: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void watch(int fd, uint32_t events, uint64_t tag, int operation) {
    struct epoll_event event = {.events = events, .data.u64 = tag};
    if (epoll_ctl(poller, operation, fd, &event) < 0) die("epoll_ctl");
}

/* Tags: a subscriber's index, or PUBLISHER_TAG + a publisher's. */
#define PUBLISHER_TAG (1ull << 40)

static void resolve(const char *name, const char *port, struct sockaddr_in *into) {
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *addresses;
    if (getaddrinfo(name, port, &hints, &addresses)) die("getaddrinfo");
    memcpy(into, addresses->ai_addr, sizeof *into);
    freeaddrinfo(addresses);
}

/* Small writes on sockets that owe nothing: on loopback they are taken whole, or something is badly wrong. */
static void write_all(struct stream *to, const char *bytes, size_t length) {
    while (length) {
        ssize_t n = stream_send(to, bytes, length);
        if (n < 0 && errno == EAGAIN) continue;
        if (n <= 0) return; /* the read side sees the end of the connection */
        bytes += n;
        length -= n;
    }
}

static void send_text(struct stream *to, const char *text) {
    char frame[512];
    size_t length = strlen(text);
    size_t at = 0;
    frame[at++] = (char)0x81;
    if (length < 126) {
        frame[at++] = (char)(0x80 | length);
    } else {
        frame[at++] = (char)(0x80 | 126);
        frame[at++] = (char)(length >> 8);
        frame[at++] = (char)length;
    }
    memset(frame + at, 0, 4); /* the mask 0 leaves the payload as it is */
    at += 4;
    memcpy(frame + at, text, length);
    write_all(to, frame, at + length);
}

/* ---- subscribers */

static void lose(struct subscriber *s) {
    if (s->stream.fd < 0) return;
    stream_close(&s->stream);
    s->stream.fd = -1;
    if (s->state == READY) ready_count--;
    s->state = FREE;
    lost_count++;
}

static void begin_connect(uint32_t index) {
    struct subscriber *s = &subscribers[index];
    memset(s, 0, sizeof *s);
    for (int p = 0; p < PUBLISHERS; p++) s->last[p] = -1;
    s->stream.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (s->stream.fd < 0) die("socket");
    int on = 1;
    setsockopt(s->stream.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (ntohl(address.sin_addr.s_addr) >> 24 == 127) {
        /* When half of an address' ports are taken, the kernel takes long to find a free one. */
        struct sockaddr_in source = {.sin_family = AF_INET};
        source.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1 + index / 5000);
        setsockopt(s->stream.fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &on, sizeof on);
        if (bind(s->stream.fd, (struct sockaddr *)&source, sizeof source) < 0) die("bind");
    }
    s->state = CONNECTING;
    if (connect(s->stream.fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) die("connect");
    watch(s->stream.fd, EPOLLOUT, index, EPOLL_CTL_ADD);
}

static void upgrade(struct subscriber *s, uint32_t index) {
    char path[160], head[640];
    snprintf(path, sizeof path, centrifugo ? "/connection/websocket" : "/app/%s?protocol=7&client=bench&version=1", key);
    int length = snprintf(head, sizeof head,
        "GET %s HTTP/1.1\r\nHost: %s:%d\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        path, host, ntohs(address.sin_port));
    write_all(&s->stream, head, length);
    s->state = HEAD;
    watch(s->stream.fd, EPOLLIN, index, EPOLL_CTL_MOD);
}

static void take_delivery(struct subscriber *s, const char *mark, uint64_t at_ns) {
    int p = (mark[1] - '0') * 10 + mark[2] - '0';
    uint32_t number = 0;
    for (int i = 3; i < MARK_BYTES; i++) number = number * 10 + (uint32_t)(mark[i] - '0');
    if (p < 0 || p >= PUBLISHERS || number >= publishers[p].sent) return;
    if ((int32_t)number <= s->last[p]) late++;
    else s->last[p] = (int32_t)number;
    delivered++;
    if (publishers[p].outstanding) publishers[p].outstanding--;
    note_latency(at_ns - publishers[p].sent_at_ns[number]);
}

/* A message of Centrifugo has replies and events, one a line. */
static void take_lines(struct subscriber *s, char *text, size_t length, uint64_t at_ns) {
    const char *end = text + length, *mark = text;
    if (s->state == ACCEPTED_NEXT && memmem(text, length, "\"subscribe\":{", 13)) {
        s->state = READY;
        ready_count++;
    } else if (length == 2 || !memcmp(text, "{}\n", 3) || memmem(text, length, "\n{}", 3)) {
        send_text(&s->stream, "{}"); /* a ping and its answer */
    }
    while (s->state == READY && (mark = memchr(mark, '#', end - mark)) && end - mark >= MARK_BYTES) {
        take_delivery(s, mark, at_ns);
        mark += MARK_BYTES;
    }
}

static void take_message(struct subscriber *s, char *text, size_t length, uint64_t at_ns) {
    if (centrifugo) {
        take_lines(s, text, length, at_ns);
    } else if (s->state == READY) {
        const char *mark = memchr(text, '#', length);
        if (mark && (size_t)(text + length - mark) >= MARK_BYTES) take_delivery(s, mark, at_ns);
        else if (memmem(text, length, "pusher:ping", 11)) send_text(&s->stream, "{\"event\":\"pusher:pong\",\"data\":{}}");
    } else if (s->state == GREETED_NEXT && memmem(text, length, "connection_established", 22)) {
        char subscribe[400];
        snprintf(subscribe, sizeof subscribe, "{\"event\":\"pusher:subscribe\",\"data\":{\"channel\":\"%s\"}}", channel);
        send_text(&s->stream, subscribe);
        s->state = ACCEPTED_NEXT;
    } else if (s->state == ACCEPTED_NEXT && memmem(text, length, "subscription_succeeded", 22)) {
        s->state = READY;
        ready_count++;
    }
}

/* Takes whole frames from `bytes`; returns how many bytes they had. */
static size_t take_frames(struct subscriber *s, char *bytes, size_t length, uint64_t at_ns) {
    size_t at = 0;
    while (length - at >= 2) {
        size_t head = 2, payload = (uint8_t)bytes[at + 1] & 0x7f;
        if (payload == 126) {
            if (length - at < 4) break;
            payload = (size_t)(uint8_t)bytes[at + 2] << 8 | (uint8_t)bytes[at + 3];
            head = 4;
        } else if (payload == 127) {
            if (length - at < 10) break;
            payload = 0;
            for (int i = 2; i < 10; i++) payload = payload << 8 | (uint8_t)bytes[at + i];
            head = 10;
        }
        if (length - at < head + payload) break;
        if ((bytes[at] & 0x0f) == 1) take_message(s, bytes + at + head, payload, at_ns);
        at += head + payload;
    }
    return at;
}

/* 0: there is nothing more to read now. */
static int read_subscriber(struct subscriber *s) {
    size_t length = s->partial_bytes;
    if (length) memcpy(buffer, s->partial, length);
    ssize_t n = stream_recv(&s->stream, buffer + length, READ_BYTES);
    if (n < 0 && errno == EAGAIN) return 0;
    if (n <= 0) {
        lose(s);
        return 0;
    }
    length += n;
    size_t at = 0;
    if (s->state == HEAD) {
        char *end = memmem(buffer, length, "\r\n\r\n", 4);
        if (end && memcmp(buffer, "HTTP/1.1 101", 12)) {
            fprintf(stderr, "client: upgrade answered: %.*s\n", (int)(end - buffer), buffer);
            lose(s);
            return 0;
        }
        if (end) {
            s->state = GREETED_NEXT;
            at = end + 4 - buffer;
        }
        if (end && centrifugo) {
            char subscribe[400];
            snprintf(subscribe, sizeof subscribe,
                "{\"id\":1,\"connect\":{}}\n{\"id\":2,\"subscribe\":{\"channel\":\"%s\"}}", channel);
            send_text(&s->stream, subscribe);
            s->state = ACCEPTED_NEXT;
        }
    }
    if (s->state != HEAD) at += take_frames(s, buffer + at, length - at, now_ns());
    size_t rest = length - at;
    if (rest > s->partial_room) {
        s->partial = realloc(s->partial, rest);
        s->partial_room = rest;
    }
    if (rest) memcpy(s->partial, buffer + at, rest);
    s->partial_bytes = rest;
    return 1;
}

/* ---- publishing */

static void connect_publisher(int p) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&publish_address, sizeof publish_address) < 0) die("publisher");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    publishers[p].fd = fd;
    publishers[p].answer_bytes = 0;
    watch(fd, EPOLLIN, PUBLISHER_TAG + p, EPOLL_CTL_ADD);
}

static void send_request(int p, uint64_t at_ns) {
    struct publisher *o = &publishers[p];
    struct request *r = o->first;
    o->first = r->next;
    if (o->fd < 0) connect_publisher(p);
    while (o->sent + r->events > o->sent_room) {
        o->sent_room = o->sent_room ? 2 * o->sent_room : 1024;
        o->sent_at_ns = realloc(o->sent_at_ns, o->sent_room * sizeof(uint64_t));
    }
    for (uint32_t i = 0; i < r->events; i++) o->sent_at_ns[o->sent + i] = at_ns;
    o->sent += r->events;
    o->outstanding += (uint64_t)r->events * ready_count;
    o->waiting_answer = 1;
    write_all(&(struct stream){.fd = o->fd}, r->bytes, r->length);
    free(r->bytes);
    free(r);
}

static void read_publisher(int p) {
    struct publisher *o = &publishers[p];
    ssize_t n = recv(o->fd, o->answer + o->answer_bytes, sizeof o->answer - 1 - o->answer_bytes, 0);
    if (n < 0 && errno == EAGAIN) return;
    int ended = n <= 0, done = 0, closes = 0;
    if (!ended) {
        o->answer_bytes += n;
        o->answer[o->answer_bytes] = 0;
        char *end = strstr(o->answer, "\r\n\r\n");
        if (end) {
            char *length = strcasestr(o->answer, "\r\ncontent-length:");
            char *chunked = strcasestr(o->answer, "\r\ntransfer-encoding: chunked");
            size_t body = o->answer + o->answer_bytes - (end + 4);
            if (length && length < end) done = body >= (size_t)atoll(length + 17);
            else if (chunked && chunked < end) done = body >= 5 && !memcmp(end + 4 + body - 5, "0\r\n\r\n", 5);
            char *connection = strcasestr(o->answer, "\r\nconnection: close");
            closes = connection && connection < end;
        }
    } else {
        done = o->waiting_answer; /* an answer without a length ends with the connection */
    }
    if (done) {
        answers++;
        if (o->answer_bytes < 12 || memcmp(o->answer + 8, " 200", 4)) {
            if (!refused++) fprintf(stderr, "client: publish answered: %.300s\n", o->answer_bytes ? o->answer : "(nothing)");
        }
        o->waiting_answer = 0;
        o->answer_bytes = 0;
    }
    if (ended || (done && closes)) {
        close(o->fd);
        o->fd = -1;
    }
}

static void read_requests(const char *path) {
    FILE *file = fopen(path, "rb");
    unsigned length, p, events;
    if (!file) die(path);
    while (fscanf(file, "%u %u %u", &length, &p, &events) == 3 && p < PUBLISHERS) {
        fgetc(file);
        struct request *r = malloc(sizeof *r);
        *r = (struct request){.bytes = malloc(length), .length = length, .events = events};
        if (fread(r->bytes, 1, length, file) != length) die("a short file of requests");
        if (publishers[p].first) publishers[p].last->next = r;
        else publishers[p].first = r;
        publishers[p].last = r;
    }
    fclose(file);
}

/* ---- the loop */

static void handle(struct epoll_event *events, int count) {
    for (int i = 0; i < count; i++) {
        uint64_t tag = events[i].data.u64;
        if (tag >= PUBLISHER_TAG) {
            if (publishers[tag - PUBLISHER_TAG].fd >= 0) read_publisher((int)(tag - PUBLISHER_TAG));
            continue;
        }
        struct subscriber *s = &subscribers[tag];
        if (s->stream.fd < 0) continue;
        if (s->state == CONNECTING) {
            int error = 0;
            socklen_t size = sizeof error;
            getsockopt(s->stream.fd, SOL_SOCKET, SO_ERROR, &error, &size);
            if (error) {
                lose(s);
            } else {
                s->state = SHAKING;
                if (stream_tls) watch(s->stream.fd, EPOLLIN, tag, EPOLL_CTL_MOD);
            }
        }
        if (s->state == SHAKING) {
            int shaken = stream_shake(&s->stream);
            if (shaken < 0) lose(s);
            else if (shaken) upgrade(s, (uint32_t)tag);
        } else if (s->state > SHAKING) {
            /* Of TLS, bytes may be left that epoll doesn't report. */
            while (read_subscriber(s) && stream_tls) {}
        }
    }
}

static void turn(int timeout_ms) {
    struct epoll_event events[EVENTS_AT_ONCE];
    int count = epoll_wait(poller, events, EVENTS_AT_ONCE, timeout_ms);
    if (count < 0 && errno != EINTR) die("epoll_wait");
    if (count > 0) handle(events, count);
}

static void reset_counts(void) {
    delivered = late = refused = answers = 0;
    memset(histogram, 0, sizeof histogram);
    for (uint32_t i = 0; i < subscriber_count; i++)
        for (int p = 0; p < PUBLISHERS; p++) subscribers[i].last[p] = -1;
    for (int p = 0; p < PUBLISHERS; p++) {
        publishers[p].sent = 0;
        publishers[p].outstanding = 0;
    }
}

static void print_result(double seconds) {
    uint64_t sent = 0, outstanding = 0;
    for (int p = 0; p < PUBLISHERS; p++) {
        sent += publishers[p].sent;
        outstanding += publishers[p].outstanding;
    }
    printf("{\"seconds\":%.6f,\"events\":%llu,\"deliveries\":%llu,\"missing\":%llu,\"late\":%llu,\"refused\":%llu,"
           "\"subscribers\":%u,\"lost_connections\":%u,\"p50_ms\":%.3f,\"p99_ms\":%.3f,\"max_ms\":%.3f}\n",
           seconds, (unsigned long long)sent, (unsigned long long)delivered, (unsigned long long)outstanding,
           (unsigned long long)late, (unsigned long long)refused, ready_count, lost_count, latency_ms(0.5),
           latency_ms(0.99), latency_ms(1.0));
    fflush(stdout);
}

static void close_publishers(void) {
    for (int p = 0; p < PUBLISHERS; p++) {
        if (publishers[p].fd >= 0) close(publishers[p].fd);
        publishers[p].fd = -1;
        publishers[p].waiting_answer = 0;
    }
}

/* Publishes all that was read. `rate` 0: each publisher continues when all have its last request; else so many a second. */
static void publish(double rate) {
    reset_counts();
    for (int p = 0; p < PUBLISHERS; p++)
        if (publishers[p].first) connect_publisher(p);
    uint64_t began = now_ns(), moved = began, seen = 0, ended = began;
    uint64_t due = began, step = rate > 0 ? (uint64_t)(1e9 / rate) : 0;
    int next = 0;
    for (;;) {
        int left = 0;
        uint64_t at = now_ns();
        for (int p = 0; p < PUBLISHERS; p++) {
            struct publisher *o = &publishers[p];
            if (!rate && o->first && !o->waiting_answer && !o->outstanding) send_request(p, now_ns());
            if (o->first || o->waiting_answer || o->outstanding) left = 1;
        }
        if (!left) break;
        int timeout_ms = 100;
        if (rate) {
            while (due <= at) {
                while (next < PUBLISHERS && !publishers[next].first) next++;
                if (next == PUBLISHERS) {
                    for (next = 0; next < PUBLISHERS && !publishers[next].first;) next++;
                    if (next == PUBLISHERS) {
                        next = 0;
                        break;
                    }
                }
                if (publishers[next].waiting_answer) break; /* sent when its turn is free, timed from when it was due */
                send_request(next, due);
                next = (next + 1) % PUBLISHERS;
                due += step;
            }
            timeout_ms = due > at ? (int)((due - at) / 1000000) : 1;
            if (timeout_ms > 100) timeout_ms = 100;
        }
        turn(timeout_ms);
        if (delivered + answers != seen) {
            seen = delivered + answers;
            moved = ended = now_ns();
        } else if (now_ns() - moved > STUCK_S * 1000000000ull) {
            break; /* what is still outstanding is reported as missing */
        }
    }
    print_result((double)(ended - began) / 1e9);
    close_publishers();
    for (int p = 0; p < PUBLISHERS; p++) publishers[p].first = NULL;
}

static void connect_subscribers(uint32_t count, uint32_t at_once) {
    uint32_t first = subscriber_count, started = subscriber_count;
    uint64_t began = now_ns(), moved = began, thousand_at = began;
    uint32_t thousand = ready_count, moved_at = ready_count;
    double last_thousand_s = 0;
    if (count < first) count = first;
    subscribers = realloc(subscribers, (size_t)count * sizeof *subscribers);
    uint32_t lost_before = lost_count;
    while (ready_count + (lost_count - lost_before) < count) {
        while (started < count && started - ready_count - (lost_count - lost_before) < at_once) {
            begin_connect(started++);
            subscriber_count = started;
        }
        turn(100);
        if (ready_count - thousand >= 1000) {
            last_thousand_s = (double)(now_ns() - thousand_at) / 1e9;
            thousand_at = now_ns();
            thousand = ready_count;
        }
        if (ready_count != moved_at) {
            moved_at = ready_count;
            moved = now_ns();
        } else if (now_ns() - moved > STUCK_S * 1000000000ull) {
            break;
        }
    }
    printf("{\"seconds\":%.6f,\"connected\":%u,\"subscribers\":%u,\"lost_connections\":%u,\"last_thousand_s\":%.6f}\n",
           (double)(now_ns() - began) / 1e9, ready_count - first, ready_count, lost_count, last_thousand_s);
    fflush(stdout);
}

static void disconnect_subscribers(void) {
    for (uint32_t i = 0; i < subscriber_count; i++) {
        if (subscribers[i].stream.fd >= 0) stream_close(&subscribers[i].stream);
        free(subscribers[i].partial);
    }
    subscriber_count = ready_count = lost_count = 0;
}

/* ---- the reference: what a server that did nothing but send() would reach with the same subscribers */

static void floor_server(int listener, int orders, uint32_t count, uint32_t frame_bytes, uint32_t joined) {
    int *fds = malloc(count * sizeof *fds);
    for (uint32_t i = 0; i < count; i++) {
        int on = 1;
        fds[i] = accept(listener, NULL, NULL);
        if (fds[i] < 0) die("accept");
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    uint32_t payload = frame_bytes - (frame_bytes - 2 < 126 ? 2 : 4);
    char *frames = malloc((size_t)frame_bytes * joined), order;
    uint32_t number = 0;
    while (read(orders, &order, 1) == 1) {
        char *at = frames;
        for (uint32_t i = 0; i < joined; i++, number++) {
            char mark[32];
            *at++ = (char)0x81;
            if (payload < 126) {
                *at++ = (char)payload;
            } else {
                *at++ = 126;
                *at++ = (char)(payload >> 8);
                *at++ = (char)payload;
            }
            memset(at, 'x', payload);
            snprintf(mark, sizeof mark, "#00%08u", number);
            memcpy(at + payload / 2, mark, MARK_BYTES);
            at += payload;
        }
        for (uint32_t i = 0; i < count; i++) send(fds[i], frames, at - frames, MSG_NOSIGNAL);
    }
    _exit(0);
}

static void floor_reference(uint32_t count, uint32_t frame_bytes, uint32_t joined, uint32_t rounds, int core) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), orders[2];
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof here;
    if (bind(listener, (struct sockaddr *)&here, size) < 0 || listen(listener, 4096) < 0) die("listen");
    getsockname(listener, (struct sockaddr *)&here, &size);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, orders) < 0) die("socketpair");
    disconnect_subscribers();
    pid_t child = fork();
    if (child == 0) {
        close(orders[1]);
        close(poller);
        if (core >= 0) {
            cpu_set_t cores;
            CPU_ZERO(&cores);
            CPU_SET(core, &cores);
            if (sched_setaffinity(0, sizeof cores, &cores) < 0) die("sched_setaffinity");
        }
        floor_server(listener, orders[0], count, frame_bytes, joined);
    }
    close(orders[0]);
    close(listener);
    subscribers = realloc(subscribers, (size_t)count * sizeof *subscribers);
    address = here;
    for (subscriber_count = 0; subscriber_count < count; subscriber_count++) {
        struct subscriber *s = &subscribers[subscriber_count];
        memset(s, 0, sizeof *s);
        s->stream.fd = socket(AF_INET, SOCK_STREAM, 0);
        if (s->stream.fd < 0 || connect(s->stream.fd, (struct sockaddr *)&address, sizeof address) < 0) die("connect");
        fcntl(s->stream.fd, F_SETFL, O_NONBLOCK);
        s->state = READY;
        watch(s->stream.fd, EPOLLIN, subscriber_count, EPOLL_CTL_ADD);
    }
    ready_count = count;
    reset_counts();
    struct publisher *o = &publishers[0];
    o->sent_at_ns = realloc(o->sent_at_ns, (size_t)rounds * joined * sizeof(uint64_t));
    o->sent_room = rounds * joined;
    uint64_t began = now_ns();
    for (uint32_t round = 0; round < rounds; round++) {
        for (uint32_t i = 0; i < joined; i++) o->sent_at_ns[o->sent++] = now_ns();
        o->outstanding = (uint64_t)joined * count;
        if (write(orders[1], "x", 1) != 1) die("orders");
        while (o->outstanding && !lost_count) turn(1000);
    }
    print_result((double)(now_ns() - began) / 1e9);
    close(orders[1]);
    waitpid(child, NULL, 0);
    disconnect_subscribers();
}

int main(void) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    stream_begin();
    poller = epoll_create1(0);
    buffer = malloc(2 * READ_BYTES);
    setvbuf(stdin, NULL, _IONBF, 0); /* select() must see what is still to be read */
    for (int p = 0; p < PUBLISHERS; p++) publishers[p].fd = -1;
    char line[2048], port[16], path[1024];
    for (;;) {
        /* Idle: pings are answered while the next command is awaited. */
        fd_set in;
        struct timeval wait = {.tv_usec = 20000};
        FD_ZERO(&in);
        FD_SET(0, &in);
        if (select(1, &in, NULL, NULL, &wait) == 0) {
            turn(0);
            continue;
        }
        if (!fgets(line, sizeof line, stdin)) break;
        unsigned count, at_once, frame_bytes, joined, rounds;
        double rate;
        int core;
        if (sscanf(line, "connect %15s %63s %15s %63s %255s %u %u", dialect, host, port, key, channel, &count,
                   &at_once) == 7) {
            centrifugo = !strcmp(dialect, "centrifugo");
            resolve(host, port, &address);
            connect_subscribers(count, at_once);
        } else if (sscanf(line, "publish %63s %15s %1023s", host, port, path) == 3) {
            resolve(host, port, &publish_address);
            read_requests(path);
            publish(0);
        } else if (sscanf(line, "paced %63s %15s %1023s %lf", host, port, path, &rate) == 4) {
            resolve(host, port, &publish_address);
            read_requests(path);
            publish(rate);
        } else if (sscanf(line, "floor %u %u %u %u %d", &count, &frame_bytes, &joined, &rounds, &core) == 5) {
            floor_reference(count, frame_bytes, joined, rounds, core);
        } else if (!strncmp(line, "disconnect", 10)) {
            disconnect_subscribers();
            printf("{}\n");
            fflush(stdout);
        } else {
            fprintf(stderr, "client: not a command: %s", line);
            return 2;
        }
    }
    return 0;
}
