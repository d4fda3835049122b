/* Many Pusher clients over TLS in one process, which bench/load/tls.py drives. One thread, one epoll.
 *
 *   tls_crowd HOST PORT KEY CHANNEL
 *
 * Commands on stdin, one a line, each answered by one line:
 *
 *   open COUNT AT_ONCE RESUME     further clients, up to COUNT in all, each connected and subscribed; with RESUME 1 they
 *                                 show the first ticket of all. Answer: clients, those of them that were resumed,
 *                                 those that were lost
 *   hello COUNT WHOLE             COUNT connections that send a ClientHello, or with WHOLE 0 the first half of it, and
 *                                 do nothing more. Answered when a whole one has its answer
 *   expect BYTES                  answered when all clients together have got BYTES more since the last `expect`
 *   ping                          each sends pusher:ping; answered when all have got something
 *   close                         close all, with close_notify
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdint.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_CLIENTS = 1 << 16, EVENTS_AT_ONCE = 256, HEAD_BYTES = 2048 };
enum state { LOST, SHAKING, HEAD, SUBSCRIBING, READY, BEGUN, HALF };

struct client {
    int fd;
    enum state state;
    SSL *ssl;
    char answered;
    int filled;
    char *got; /* until it is READY */
};

static struct client clients[MAX_CLIENTS];
static int count, ready, resumed, lost, epoll_fd, answers;
static uint64_t received;
static SSL_CTX *context;
static SSL_SESSION *session;
static struct sockaddr_in address = {.sin_family = AF_INET};
static char request[512], subscribe[256];
static int subscribe_size;

static int keep(SSL *ssl, SSL_SESSION *received) {
    (void)ssl;
    if (session) return 0;
    session = received;
    return 1;
}

static void lose(struct client *c) {
    SSL_free(c->ssl);
    close(c->fd);
    free(c->got);
    if (c->state == READY) ready--;
    lost += c->state < BEGUN || (c->state == HALF && !c->answered);
    c->state = LOST;
    c->ssl = NULL;
    c->got = NULL;
}

static void send_hello(struct client *c) {
    char *hello;
    BIO *out = BIO_new(BIO_s_mem());
    /* Without an answer to read, SSL_connect doesn't go on. */
    SSL_set_bio(c->ssl, BIO_new(BIO_s_mem()), out);
    SSL_connect(c->ssl);
    long size = BIO_get_mem_data(out, &hello);
    if (c->state == BEGUN) size /= 2;
    if (send(c->fd, hello, size, MSG_NOSIGNAL) != size) {
        perror("tls_crowd: hello");
        exit(1);
    }
}

static void hear(int index);

static void begin(int index, int resume, enum state state) {
    struct client *c = &clients[index];
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address)) {
        perror("tls_crowd: connect");
        exit(1);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->ssl = SSL_new(context);
    SSL_set_tlsext_host_name(c->ssl, "localhost");
    if (resume && session) {
        /* A copy, because a session of TLS 1.3 is for one use. */
        SSL_SESSION *copy = SSL_SESSION_dup(session);
        SSL_set_session(c->ssl, copy);
        SSL_SESSION_free(copy);
    }
    if (state < BEGUN) SSL_set_fd(c->ssl, c->fd);
    c->state = state;
    c->answered = 0;
    c->filled = 0;
    c->got = malloc(HEAD_BYTES);
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)index};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
    ERR_clear_error();
    if (state >= BEGUN) send_hello(c);
    else hear(index);
}

static void hear(int index) {
    static char bytes[1 << 16];
    struct client *c = &clients[index];
    int size;
    if (c->state == LOST) return;
    if (c->state >= BEGUN) {
        while ((size = recv(c->fd, bytes, sizeof bytes, 0)) > 0) {
            answers += !c->answered;
            c->answered = 1;
        }
        if (size == 0) lose(c);
        return;
    }
    ERR_clear_error();
    if (c->state == SHAKING) {
        size = SSL_connect(c->ssl);
        if (size != 1) {
            if (SSL_get_error(c->ssl, size) != SSL_ERROR_WANT_READ) lose(c);
            return;
        }
        resumed += SSL_session_reused(c->ssl);
        SSL_write(c->ssl, request, (int)strlen(request));
        c->state = HEAD;
    }
    while ((size = SSL_read(c->ssl, bytes, sizeof bytes)) > 0) {
        if (c->state == READY) {
            received += size;
            answers += !c->answered;
            c->answered = 1;
            continue;
        }
        if (size > HEAD_BYTES - c->filled) size = HEAD_BYTES - c->filled;
        memcpy(c->got + c->filled, bytes, size);
        c->filled += size;
        if (c->state == HEAD && memmem(c->got, c->filled, "connection_established", 22)) {
            SSL_write(c->ssl, subscribe, subscribe_size);
            c->state = SUBSCRIBING;
        } else if (c->state == SUBSCRIBING && memmem(c->got, c->filled, "subscription_succeeded", 22)) {
            c->state = READY;
            free(c->got);
            c->got = NULL;
            ready++;
        }
    }
    if (SSL_get_error(c->ssl, size) != SSL_ERROR_WANT_READ) lose(c);
}

static void hear_some(void) {
    struct epoll_event events[EVENTS_AT_ONCE];
    int event_count = epoll_wait(epoll_fd, events, EVENTS_AT_ONCE, 100);
    for (int i = 0; i < event_count; i++)
        if (events[i].data.u32 != UINT32_MAX) hear((int)events[i].data.u32);
}

static void obey(void) {
    char line[128];
    int want, at_once, resume, whole;
    uint64_t bytes;
    if (!fgets(line, sizeof line, stdin)) exit(0);
    if (sscanf(line, "open %d %d %d", &want, &at_once, &resume) == 3) {
        resumed = lost = 0;
        while (ready < want && !lost) {
            while (count < want && count - ready < at_once) begin(count++, resume, SHAKING);
            hear_some();
        }
        printf("%d %d %d\n", ready, resumed, lost);
    } else if (sscanf(line, "hello %d %d", &want, &whole) == 2) {
        answers = lost = 0;
        for (int i = 0; i < want; i++) begin(count++, 0, whole ? HALF : BEGUN);
        while (whole && answers < want && !lost) hear_some();
        printf("%d\n", lost);
    } else if (sscanf(line, "expect %lu", &bytes) == 1) {
        printf("ready\n");
        fflush(stdout);
        while (received < bytes && !lost) hear_some();
        received -= bytes;
        printf("%d\n", lost);
    } else if (!strcmp(line, "ping\n")) {
        static const char ping[] = "\x81\xa3\0\0\0\0{\"event\":\"pusher:ping\",\"data\":\"{}\"}";
        answers = 0;
        for (int i = 0; i < count; i++) clients[i].answered = 0;
        for (int i = 0; i < count; i++)
            if (clients[i].state == READY) SSL_write(clients[i].ssl, ping, sizeof ping - 1);
        while (answers < ready && !lost) hear_some();
        received = 0;
        printf("%d\n", answers);
    } else if (!strcmp(line, "close\n")) {
        for (int i = 0; i < count; i++)
            if (clients[i].state != LOST) {
                if (clients[i].state < BEGUN) SSL_shutdown(clients[i].ssl);
                lose(&clients[i]);
            }
        count = ready = 0;
        received = 0;
        printf("closed\n");
    }
    fflush(stdout);
}

int main(int argc, char **argv) {
    struct rlimit files;
    if (argc != 5) return 2;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdin, NULL, _IONBF, 0);
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    address.sin_port = htons((uint16_t)atoi(argv[2]));
    snprintf(request, sizeof request,
        "GET /app/%s?protocol=7&client=bench&version=1 HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        argv[3], argv[1]);
    int size = snprintf(subscribe + 6, sizeof subscribe - 6,
        "{\"event\":\"pusher:subscribe\",\"data\":{\"channel\":\"%s\"}}", argv[4]);
    subscribe[0] = (char)0x81;
    subscribe[1] = (char)(0x80 | size);
    subscribe_size = size + 6;
    context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
    SSL_CTX_sess_set_new_cb(context, keep);
    epoll_fd = epoll_create1(0);
    struct epoll_event commands = {.events = EPOLLIN, .data.u32 = UINT32_MAX};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, 0, &commands);
    for (;;) {
        struct epoll_event events[EVENTS_AT_ONCE];
        int event_count = epoll_wait(epoll_fd, events, EVENTS_AT_ONCE, -1);
        for (int i = 0; i < event_count; i++) {
            if (events[i].data.u32 == UINT32_MAX) obey();
            else hear((int)events[i].data.u32);
        }
    }
}
