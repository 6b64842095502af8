/* Bytes between two ranks over a connected socket that never blocks, for collective.c. */
#ifndef MINDGRPO_WIRE_H
#define MINDGRPO_WIRE_H

#include <stdint.h>

enum { WIRE_OVER = 0, WIRE_CLOSED = 1, WIRE_OUT_OF_STEP = 2, WIRE_GIVEN_UP = 3 };

/* Asked twice a second while nothing moves; not 0: give up. */
typedef int (*WireCheck)(const void *context);

/* `operation` travels in front of the bytes: the other end must ask for the same one. */
int wire_send(int socket, int64_t operation, const void *bytes, int64_t count, WireCheck check, const void *context);
int wire_receive(int socket, int64_t operation, void *bytes, int64_t count, WireCheck check, const void *context);

#endif
