/* The least TLS server that bench/load/tls.py compares with: OpenSSL, one thread, one epoll, SSL_MODE_RELEASE_BUFFERS.
 *
 *   bare_tls PEM            prints its port; PEM has a key and its certificate
 *
 * Answers a request with 101 and pusher:connection_established, a frame with pusher_internal:subscription_succeeded,
 * whatever they say. Commands on stdin, one a line, each answered with "done":
 *
 *   write FRAMES BYTES      FRAMES of BYTES in one SSL_write to each client
 *
 * No limits, no checks of what it receives: never use it for anything else.
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
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_FDS = 1 << 16, EVENTS_AT_ONCE = 256 };

static struct { SSL *ssl; char ready; } clients[MAX_FDS];
static int epoll_fd, listening, highest;
static SSL_CTX *context;

static const char WELCOME[] =
    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
    "\x81\x73{\"event\":\"pusher:connection_established\",\"data\":\"{\\\"socket_id\\\":\\\"123456789.123456789\\\","
    "\\\"activity_timeout\\\":120}\"}";
static const char SUBSCRIBED[] =
    "\x81\x4e{\"event\":\"pusher_internal:subscription_succeeded\",\"channel\":\"tls\",\"data\":\"{}\"}";

static void watch(int fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
}

static void drop(int fd) {
    SSL_free(clients[fd].ssl);
    clients[fd].ssl = NULL;
    close(fd);
}

static void accept_some(void) {
    int fd;
    while ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        clients[fd].ssl = SSL_new(context);
        clients[fd].ready = 0;
        SSL_set_fd(clients[fd].ssl, fd);
        SSL_set_accept_state(clients[fd].ssl);
        if (fd > highest) highest = fd;
        watch(fd);
    }
}

static void hear(int fd) {
    char bytes[4096];
    SSL *ssl = clients[fd].ssl;
    int size;
    if (!ssl) return;
    ERR_clear_error();
    while ((size = SSL_read(ssl, bytes, sizeof bytes)) > 0) {
        if (!memcmp(bytes, "GET ", 4)) SSL_write(ssl, WELCOME, sizeof WELCOME - 1);
        else SSL_write(ssl, SUBSCRIBED, sizeof SUBSCRIBED - 1);
        clients[fd].ready = 1;
    }
    if (SSL_get_error(ssl, size) != SSL_ERROR_WANT_READ) drop(fd);
}

static void write_all(const char *bytes, int size) {
    for (int fd = 0; fd <= highest; fd++) {
        if (!clients[fd].ssl || !clients[fd].ready) continue;
        while (SSL_write(clients[fd].ssl, bytes, size) <= 0) {
            struct pollfd room = {fd, POLLOUT, 0};
            poll(&room, 1, 1000);
        }
    }
}

static void obey(void) {
    static char line[256], bytes[1 << 20];
    int frames, size;
    if (!fgets(line, sizeof line, stdin)) exit(0);
    if (sscanf(line, "write %d %d", &frames, &size) == 2 && frames * size < (int)sizeof bytes)
        write_all(bytes, frames * size);
    printf("done\n");
    fflush(stdout);
}

int main(int argc, char **argv) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    struct epoll_event events[EVENTS_AT_ONCE];
    struct rlimit files;
    if (argc != 2) return 2;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdin, NULL, _IONBF, 0);
    context = SSL_CTX_new(TLS_server_method());
    SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_num_tickets(context, 1);
    SSL_CTX_set_session_id_context(context, (const unsigned char *)"bare", 4);
    if (SSL_CTX_use_certificate_chain_file(context, argv[1]) != 1 ||
        SSL_CTX_use_PrivateKey_file(context, argv[1], SSL_FILETYPE_PEM) != 1) {
        ERR_print_errors_fp(stderr);
        return 1;
    }
    listening = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    epoll_fd = epoll_create1(0);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) || listen(listening, 4096)) {
        perror("listen");
        return 1;
    }
    getsockname(listening, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    watch(listening);
    watch(0);
    for (;;) {
        int event_count = epoll_wait(epoll_fd, events, EVENTS_AT_ONCE, -1);
        for (int i = 0; i < event_count; i++) {
            int fd = events[i].data.fd;
            if (fd == 0) obey();
            else if (fd == listening) accept_some();
            else hear(fd);
        }
    }
}
