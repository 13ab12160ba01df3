// Registers what the sparse codecs use of tacit._core.
#pragma once

#include <nanobind/nanobind.h>

namespace tacit {
void bind_sparse(nanobind::module_& m);
}
