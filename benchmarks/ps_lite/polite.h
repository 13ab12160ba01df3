// A pause for ps-lite's receiving thread until its socket has something, a millisecond at most; the loop it
// is put into has none.
#pragma once

#include <poll.h>
#include <zmq.h>

inline void polite(void* socket) {
    thread_local void* known = nullptr;
    thread_local pollfd ready{-1, POLLIN, 0};
    if (known != socket) {
        std::size_t size = sizeof(ready.fd);
        zmq_getsockopt(socket, ZMQ_FD, &ready.fd, &size);
        known = socket;
    }
    poll(&ready, 1, 1);
}
