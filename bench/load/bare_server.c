/* The least server that bench/load/swarm.py can run against, to find what swarm itself costs.
 *
 * Speaks as much of the Pusher protocol as a public channel needs, without checks: upgrades, answers each subscribe
 * with success, each ping with a pong, and copies the data of each POST to all connections, one send() each. One
 * thread, one epoll. Prints its port. No limits, no errors, no partial writes: never use it for anything else.
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_FDS = 1 << 17, READ_BYTES = 1 << 16 };

static char open_sockets[MAX_FDS];
static int highest;

static uint32_t rotate(uint32_t value, int bits) { return value << bits | value >> (32 - bits); }

/* SHA-1 (RFC 3174) of at most 119 bytes. */
static void sha1(const char *text, size_t size, uint8_t digest[20])
{
    uint8_t padded[128] = {0};
    size_t blocks = size < 56 ? 1 : 2;
    uint32_t hash[5] = {0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0};
    memcpy(padded, text, size);
    padded[size] = 0x80;
    for (int i = 0; i < 8; i++)
        padded[blocks * 64 - 1 - i] = (uint8_t)((uint64_t)size * 8 >> (8 * i));
    for (size_t block = 0; block < blocks; block++) {
        uint32_t words[80], a = hash[0], b = hash[1], c = hash[2], d = hash[3], e = hash[4];
        for (int i = 0; i < 16; i++) {
            const uint8_t *at = padded + block * 64 + i * 4;
            words[i] = (uint32_t)at[0] << 24 | at[1] << 16 | at[2] << 8 | at[3];
        }
        for (int i = 16; i < 80; i++)
            words[i] = rotate(words[i - 3] ^ words[i - 8] ^ words[i - 14] ^ words[i - 16], 1);
        for (int i = 0; i < 80; i++) {
            uint32_t mixed = i < 20   ? ((b & c) | (~b & d)) + 0x5A827999
                             : i < 40 ? (b ^ c ^ d) + 0x6ED9EBA1
                             : i < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDC
                                      : (b ^ c ^ d) + 0xCA62C1D6;
            uint32_t next = rotate(a, 5) + mixed + e + words[i];
            e = d;
            d = c;
            c = rotate(b, 30);
            b = a;
            a = next;
        }
        hash[0] += a;
        hash[1] += b;
        hash[2] += c;
        hash[3] += d;
        hash[4] += e;
    }
    for (int i = 0; i < 20; i++)
        digest[i] = (uint8_t)(hash[i / 4] >> (24 - 8 * (i % 4)));
}

static void base64(const uint8_t digest[20], char *out)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < 21; i += 3) {
        uint32_t bits = digest[i] << 16 | digest[i + 1] << 8 | (i + 2 < 20 ? digest[i + 2] : 0);
        for (int k = 0; k < 4; k++)
            *out++ = letters[bits >> (18 - 6 * k) & 63];
    }
    out[-1] = '=';
    *out = 0;
}

static void say(int fd, const char *text, size_t size)
{
    if (send(fd, text, size, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)size)
        fprintf(stderr, "bare_server: socket %d was full\n", fd);
}

/* A text frame into `out`; returns its length. */
static size_t frame(char *out, const char *text, size_t size)
{
    size_t head = size < 126 ? 2 : 4;
    out[0] = (char)0x81;
    out[1] = size < 126 ? (char)size : 126;
    if (head == 4) {
        out[2] = (char)(size >> 8);
        out[3] = (char)size;
    }
    memcpy(out + head, text, size);
    return head + size;
}

static void upgrade(int fd, const char *key)
{
    char joined[128], accept[32], answer[512];
    uint8_t digest[20];
    int size = snprintf(joined, sizeof joined, "%.24s258EAFA5-E914-47DA-95CA-C5AB0DC85B11", key);
    sha1(joined, (size_t)size, digest);
    base64(digest, accept);
    size = snprintf(answer, sizeof answer,
                    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    "Sec-WebSocket-Accept: %s\r\n\r\n", accept);
    char text[200];
    int length = snprintf(text, sizeof text,
                          "{\"event\":\"pusher:connection_established\","
                          "\"data\":\"{\\\"socket_id\\\":\\\"1.%d\\\",\\\"activity_timeout\\\":120}\"}", fd);
    size += (int)frame(answer + size, text, (size_t)length);
    say(fd, answer, (size_t)size);
    open_sockets[fd] = 1;
}

/* The string after `"name":"` in `text`, up to the next quote; NULL without. */
static char *string_of(char *text, const char *name, size_t *size)
{
    char *at = strstr(text, name), *end;
    if (!at || !(end = strchr(at += strlen(name), '"')))
        return NULL;
    *size = (size_t)(end - at);
    return at;
}

static void publish(int fd, char *body)
{
    static char text[4096], out[4200];
    size_t channel_size, data_size;
    char *channel = string_of(body, "\"channels\":[\"", &channel_size);
    char *data = string_of(body, "\"data\":\"", &data_size);
    if (channel && data) {
        int size = snprintf(text, sizeof text, "{\"event\":\"swarm-event\",\"channel\":\"%.*s\",\"data\":\"%.*s\"}",
                            (int)channel_size, channel, (int)data_size, data);
        size_t length = frame(out, text, (size_t)size);
        for (int other = 0; other <= highest; other++)
            if (open_sockets[other])
                say(other, out, length);
    }
    static const char ok[] = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
    say(fd, ok, sizeof ok - 1);
}

static void message(int fd, char *text)
{
    char out[512], answer[600];
    size_t size;
    if (strstr(text, "\"pusher:ping\"")) {
        int length = snprintf(out, sizeof out, "{\"event\":\"pusher:pong\",\"data\":\"{}\"}");
        say(fd, answer, frame(answer, out, (size_t)length));
        return;
    }
    char *channel = string_of(text, "\"channel\":\"", &size);
    if (channel) {
        int length = snprintf(out, sizeof out,
                              "{\"event\":\"pusher_internal:subscription_succeeded\",\"channel\":\"%.*s\",\"data\":\"{}\"}",
                              (int)(size < 200 ? size : 200), channel);
        say(fd, answer, frame(answer, out, (size_t)length));
    }
}

/* One read: a whole request, or whole frames. Both clients, swarm and its publisher, write small ones in one piece. */
static int heard(int fd)
{
    static char at[READ_BYTES + 1];
    ssize_t got = recv(fd, at, READ_BYTES, MSG_DONTWAIT);
    if (got <= 0)
        return 0;
    at[got] = 0;
    if (open_sockets[fd]) {
        for (char *end = at + got, *frame_at = at; end - frame_at >= 6;) {
            int opcode = frame_at[0] & 15;
            size_t size = frame_at[1] & 127;
            char *mask = frame_at + 2;
            if (size == 126) {
                size = (size_t)(uint8_t)frame_at[2] << 8 | (uint8_t)frame_at[3];
                mask += 2;
            }
            char *payload = mask + 4;
            if (payload + size > end)
                break;
            if (opcode == 8)
                return 0;
            char text[4096];
            size_t copied = size < sizeof text - 1 ? size : sizeof text - 1;
            for (size_t i = 0; i < copied; i++)
                text[i] = payload[i] ^ mask[i & 3];
            text[copied] = 0;
            if (opcode == 1)
                message(fd, text);
            frame_at = payload + size;
        }
        return 1;
    }
    char *key = strcasestr(at, "sec-websocket-key: ");
    if (key) {
        upgrade(fd, key + 19);
        return 1;
    }
    char *body = strstr(at, "\r\n\r\n");
    char *length = strcasestr(at, "content-length: ");
    if (!body || !length)
        return 0;
    /* The body may come in a packet of its own. */
    size_t whole = (size_t)(body - at) + 4 + (size_t)atol(length + 16);
    while ((size_t)got < whole && whole < READ_BYTES) {
        ssize_t more = recv(fd, at + got, whole - (size_t)got, 0);
        if (more <= 0)
            return 0;
        got += more;
    }
    at[got] = 0;
    publish(fd, body + 4);
    return 1;
}

int main(void)
{
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096))
        return 1;
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int count = epoll_wait(poller, ready, 256, -1);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                fd = accept4(listener, NULL, NULL, 0);
                if (fd < 0 || fd >= MAX_FDS)
                    continue;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                event = (struct epoll_event){.events = EPOLLIN, .data.fd = fd};
                epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
                highest = fd > highest ? fd : highest;
            } else if (!heard(fd)) {
                open_sockets[fd] = 0;
                close(fd);
            }
        }
    }
}
