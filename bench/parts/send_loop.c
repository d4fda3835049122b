/* The reference of bench/parts/fanout.py: what a fan-out costs when nothing is left of it but the system call. */

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>

/* Writes the same bytes to every socket. Returns how many sockets took all of them. */
int send_to_all(const int *sockets, int count, const char *at, size_t size)
{
    int whole = 0;
    for (int i = 0; i < count; i++)
        whole += send(sockets[i], at, size, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)size;
    return whole;
}

/* Reads every socket empty, for both sides of the comparison alike. Returns the bytes read. */
long drain_all(const int *sockets, int count)
{
    static char thrown_away[1 << 20];
    long total = 0;
    for (int i = 0; i < count; i++) {
        ssize_t got;
        while ((got = recv(sockets[i], thrown_away, sizeof thrown_away, MSG_DONTWAIT)) > 0)
            total += got;
    }
    return total;
}
