/* See wire.h. Python has connected the sockets, and authenticated both ends; it also closes them. */
#include "wire.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define CHECK_MS 500

/* 0 where the socket may be ready, or the check's verdict. */
static int wait_ready(int socket, short events, WireCheck check, const void *context) {
    struct pollfd wanted = {socket, events, 0};
    while (poll(&wanted, 1, CHECK_MS) == 0)
        if (check(context)) return WIRE_GIVEN_UP;
    return WIRE_OVER;
}

static int may_come(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

int wire_send(int socket, int64_t operation, const void *bytes, int64_t count, WireCheck check, const void *context) {
    int64_t total = (int64_t)sizeof operation + count;
    for (int64_t at = 0; at < total;) {
        int64_t head = at < (int64_t)sizeof operation ? (int64_t)sizeof operation - at : 0;
        int64_t body = at + head - (int64_t)sizeof operation;
        struct iovec parts[] = {{(char *)&operation + sizeof operation - head, head},
                                {(char *)bytes + body, count - body}};
        struct msghdr message = {.msg_iov = parts + !head, .msg_iovlen = 1 + !!head};
        ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL);
        if (sent < 0 && !may_come()) return WIRE_CLOSED;
        if (sent < 0 && wait_ready(socket, POLLOUT, check, context)) return WIRE_GIVEN_UP;
        at += sent > 0 ? sent : 0;
    }
    return WIRE_OVER;
}

static int receive_all(int socket, char *bytes, int64_t count, WireCheck check, const void *context) {
    for (int64_t at = 0; at < count;) {
        ssize_t got = recv(socket, bytes + at, count - at, 0);
        if (got == 0 || (got < 0 && !may_come())) return WIRE_CLOSED;
        if (got < 0 && wait_ready(socket, POLLIN, check, context)) return WIRE_GIVEN_UP;
        at += got > 0 ? got : 0;
    }
    return WIRE_OVER;
}

int wire_receive(int socket, int64_t operation, void *bytes, int64_t count, WireCheck check, const void *context) {
    int64_t told;
    int status = receive_all(socket, (char *)&told, sizeof told, check, context);
    if (status) return status;
    if (told != operation) return WIRE_OUT_OF_STEP;
    return receive_all(socket, bytes, count, check, context);
}
