// How the core says no: one sentence, which Python gets as a ValueError.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace tacit {

// Throws std::invalid_argument with all parts, texts and numbers, as one text.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::string text;
    const auto add = [&](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
            text += std::to_string(part);
        else
            text += part;
    };
    (add(parts), ...);
    throw std::invalid_argument(text);
}

}  // namespace tacit
