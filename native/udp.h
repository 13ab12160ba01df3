// What the plane and the client share of UDP sockets.
#pragma once

#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "wire.h"

namespace tacit {

inline constexpr std::size_t most_udp = 65507, most_pieces = 64;  // bytes, packets of one message

// Closes what it holds.
class Fd {
  public:
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&&) = delete;
    ~Fd() { reset(); }
    void reset() {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }
    operator int() const { return fd_; }

  private:
    int fd_;
};

[[noreturn]] inline void fail(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

inline sockaddr_in sockaddr_of(tacit_address address) {
    sockaddr_in found{};
    found.sin_family = AF_INET;
    found.sin_addr.s_addr = address.ip;
    found.sin_port = address.port;
    return found;
}

template <class Value>
bool set_option(int fd, int level, int option, const Value& value) {
    return ::setsockopt(fd, level, option, &value, sizeof value) == 0;
}

// Bound to `address`; `shared`: along with others. Buffers as large as this user may have; a
// queue that does not move keeps a thread for `send_limit` at most.
inline Fd open_udp(tacit_address address, int buffer_nbytes, timeval send_limit, bool shared = false) {
    Fd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd < 0) fail("socket");
    if (shared) set_option(fd, SOL_SOCKET, SO_REUSEPORT, 1);
    for (const auto& [forced, asked] : {std::pair(SO_RCVBUFFORCE, SO_RCVBUF), {SO_SNDBUFFORCE, SO_SNDBUF}})
        if (!set_option(fd, SOL_SOCKET, forced, buffer_nbytes))
            set_option(fd, SOL_SOCKET, asked, buffer_nbytes);
    set_option(fd, SOL_SOCKET, SO_SNDTIMEO, send_limit);
    const sockaddr_in here = sockaddr_of(address);
    if (::bind(fd, reinterpret_cast<const sockaddr*>(&here), sizeof here) != 0)
        fail("bind to UDP port " + std::to_string(ntohs(address.port)));
    return fd;
}

inline tacit_address address_of(int fd) {
    sockaddr_in found{};
    socklen_t nbytes = sizeof found;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&found), &nbytes) != 0) fail("getsockname");
    return {found.sin_addr.s_addr, found.sin_port, 0};
}

// Room for one control message of the size of a packet in a longer message: ours, or the kernel's.
struct alignas(cmsghdr) SegmentSize {
    char bytes[CMSG_SPACE(sizeof(int))];

    // Tells the kernel to cut the message into packets of `nbytes`.
    void attach(msghdr& message, std::uint16_t nbytes) {
        message.msg_control = bytes;
        message.msg_controllen = CMSG_SPACE(sizeof nbytes);
        cmsghdr* const control = CMSG_FIRSTHDR(&message);
        control->cmsg_level = SOL_UDP;
        control->cmsg_type = UDP_SEGMENT;
        control->cmsg_len = CMSG_LEN(sizeof nbytes);
        std::memcpy(CMSG_DATA(control), &nbytes, sizeof nbytes);
    }

    // What the kernel says of a message that was put together from packets.
    static std::size_t read(const msghdr& message, std::size_t otherwise) {
        const cmsghdr* const control = CMSG_FIRSTHDR(&message);
        if (!control || control->cmsg_level != SOL_UDP || control->cmsg_type != UDP_GRO) return otherwise;
        int nbytes = 0;
        std::memcpy(&nbytes, CMSG_DATA(control), sizeof nbytes);
        return nbytes > 0 ? std::size_t(nbytes) : otherwise;
    }
};

}  // namespace tacit
