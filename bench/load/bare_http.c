/* The reference of bench/load/publish.py: answers every HTTP request with `{}` and checks nothing.
 *
 *     bare_http            prints its port; one thread, one epoll
 *
 * Reads until the announced body is there, understands Content-Length and `Connection: close`, one request at a time on
 * each connection. What it costs is what the kernel costs; no HTTP server of any language can be faster.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_FDS = 1 << 16, REQUEST_BYTES = 1 << 16 };

static const char KEPT[] = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
static const char CLOSED[] =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}";

/* Bytes that are still missing of the request under way, 0 between requests. */
static size_t missing[MAX_FDS];
static char closes[MAX_FDS], buffer[REQUEST_BYTES + 1];

static void answer(int fd)
{
    if (closes[fd]) {
        send(fd, CLOSED, sizeof CLOSED - 1, MSG_NOSIGNAL);
        close(fd);
    } else {
        send(fd, KEPT, sizeof KEPT - 1, MSG_NOSIGNAL);
    }
}

int main(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listening = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), epoll = epoll_create1(0);
    if (bind(listening, (struct sockaddr *)&address, size) || listen(listening, 4096)) { perror("listen"); return 1; }
    getsockname(listening, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listening}, events[256];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listening, &event);
    for (;;) {
        int ready = epoll_wait(epoll, events, 256, -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == listening) {
                while ((fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    if (fd >= MAX_FDS) { close(fd); continue; }
                    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
                    missing[fd] = 0;
                    event.data.fd = fd;
                    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
                }
                continue;
            }
            ssize_t got = recv(fd, buffer, REQUEST_BYTES, 0);
            if (got <= 0) {
                if (got == 0 || errno != EAGAIN) close(fd);
                continue;
            }
            if (missing[fd]) {
                missing[fd] -= (size_t)got < missing[fd] ? (size_t)got : missing[fd];
                if (!missing[fd]) answer(fd);
                continue;
            }
            buffer[got] = 0;
            char *end = strstr(buffer, "\r\n\r\n"), *length = strcasestr(buffer, "\r\ncontent-length:");
            if (!end) { close(fd); continue; }
            size_t whole = end + 4 - buffer + (length && length < end ? strtoul(length + 17, NULL, 10) : 0);
            char *close_line = strcasestr(buffer, "\r\nconnection: close");
            closes[fd] = close_line && close_line < end;
            if ((size_t)got < whole) missing[fd] = whole - got;
            else answer(fd);
        }
    }
}
