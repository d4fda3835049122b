/* Connections of the clients in C, with TLS or without: a descriptor and, with TLS, OpenSSL's state of it.
 *
 * Compiled with -DTLS -lssl -lcrypto a program can speak TLS; `stream_tls = 1` has it do so. The certificate isn't
 * checked: benches make their own. With `stream_resumes`, connections show the first ticket that any of them got.
 */
#ifndef STREAM_H
#define STREAM_H
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#ifdef TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#endif

struct stream {
    int fd;
#ifdef TLS
    SSL *ssl; /* NULL without TLS */
#endif
};

static int stream_tls __attribute__((unused));
static int stream_resumes __attribute__((unused));

#ifdef TLS
static SSL_SESSION *stream_session;

static int stream_keep(SSL *ssl, SSL_SESSION *received) {
    (void)ssl;
    if (stream_session) return 0;
    stream_session = received;
    return 1;
}

static SSL_CTX *stream_context(void) {
    static SSL_CTX *context;
    if (context) return context;
    context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
    SSL_CTX_sess_set_new_cb(context, stream_keep);
    return context;
}

/* What OpenSSL's error is as an errno. */
static ssize_t stream_fault(struct stream *s, int result) {
    int error = SSL_get_error(s->ssl, result);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
        errno = EAGAIN;
        return -1;
    }
    if (error == SSL_ERROR_ZERO_RETURN) return 0;
    if (error != SSL_ERROR_SYSCALL || !errno) errno = ECONNRESET;
    return -1;
}
#endif

/* The handshake of a connected socket, as far as it goes: 1 when it is over, 0 when it waits, -1 when it failed. */
static inline int stream_shake(struct stream *s) {
#ifdef TLS
    if (stream_tls) {
        if (!s->ssl) {
            s->ssl = SSL_new(stream_context());
            SSL_set_fd(s->ssl, s->fd);
            if (stream_resumes && stream_session) {
                /* A copy, because a session of TLS 1.3 is for one use. */
                SSL_SESSION *copy = SSL_SESSION_dup(stream_session);
                SSL_set_session(s->ssl, copy);
                SSL_SESSION_free(copy);
            }
        }
        ERR_clear_error();
        int result = SSL_connect(s->ssl);
        if (result == 1) return 1;
        return stream_fault(s, result) < 0 && errno == EAGAIN ? 0 : -1;
    }
#endif
    (void)s;
    return 1;
}

/* As recv(2) and send(2) of a non-blocking socket. With TLS bytes may be left that epoll doesn't report: read on until
 * EAGAIN. */
static inline ssize_t stream_recv(struct stream *s, void *to, size_t size) {
#ifdef TLS
    if (s->ssl) {
        ERR_clear_error();
        int got = SSL_read(s->ssl, to, (int)size);
        return got > 0 ? got : stream_fault(s, got);
    }
#endif
    return recv(s->fd, to, size, MSG_DONTWAIT);
}

static inline ssize_t stream_send(struct stream *s, const void *at, size_t size) {
#ifdef TLS
    if (s->ssl) {
        ERR_clear_error();
        int sent = SSL_write(s->ssl, at, (int)size);
        return sent > 0 ? sent : stream_fault(s, sent);
    }
#endif
    return send(s->fd, at, size, MSG_NOSIGNAL);
}

static inline void stream_close(struct stream *s) {
#ifdef TLS
    SSL_free(s->ssl);
    s->ssl = NULL;
#endif
    close(s->fd);
}

/* At the program's start: with the word "tls" in the environment's BENCH_TLS. */
static inline void stream_begin(void) {
    const char *word = getenv("BENCH_TLS");
    if (!word || !*word) return;
#ifdef TLS
    stream_tls = 1;
#else
    fprintf(stderr, "compiled without TLS\n");
    exit(2);
#endif
}
#endif
