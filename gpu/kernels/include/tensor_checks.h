// Checks of tensors, with errors as in fragmeter.gpu.checks: one line with the field, the value and the remedy.
#pragma once

#include <torch/types.h>

#include <sstream>
#include <string>
#include <vector>

namespace fragmeter {

// Formats a shape as a Python tuple.
inline std::string shown(c10::IntArrayRef extents) {
    std::ostringstream text;
    for (size_t place = 0; place < extents.size(); ++place) text << (place ? ", " : "") << extents[place];
    return "(" + text.str() + (extents.size() == 1 ? ",)" : ")");
}

inline const char *shown(c10::ScalarType dtype) {
    switch (dtype) {
        case torch::kHalf: return "float16";
        case torch::kBFloat16: return "bfloat16";
        case torch::kFloat: return "float32";
        case torch::kDouble: return "float64";
        case torch::kInt: return "int32";
        case torch::kLong: return "int64";
        default: return c10::toString(dtype);
    }
}

constexpr int64_t kAny = -1;

inline void expect_shape(const char *field, const torch::Tensor &tensor, const std::vector<int64_t> &extents) {
    bool matches = static_cast<int64_t>(extents.size()) == tensor.dim();
    std::ostringstream wanted;
    for (size_t place = 0; place < extents.size(); ++place) {
        matches = matches && (extents[place] == kAny || extents[place] == tensor.size(place));
        wanted << (place ? ", " : "") << (extents[place] == kAny ? "any" : std::to_string(extents[place]));
    }
    TORCH_CHECK_VALUE(matches, field, ".shape = ", shown(tensor.sizes()), ": must be (", wanted.str(), ")");
}

inline void expect_dtype(const char *field, const torch::Tensor &tensor, const std::vector<c10::ScalarType> &dtypes) {
    bool matches = false;
    std::ostringstream wanted;
    for (const c10::ScalarType dtype : dtypes) {
        matches = matches || dtype == tensor.scalar_type();
        wanted << (wanted.tellp() ? " or " : "") << shown(dtype);
    }
    TORCH_CHECK_VALUE(matches, field, ".dtype = '", shown(tensor.scalar_type()), "': must be ", wanted.str());
}

// The tensor must be contiguous and on the device of `first`, which must be of the kind that this build runs on.
inline void expect_place(const char *field, const torch::Tensor &tensor, const char *first_field,
                         const torch::Tensor &first, c10::DeviceType kind) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), field, " = 'strides of ", shown(tensor.sizes()),
                      "': must be contiguous (C order)");
    TORCH_CHECK_VALUE(first.device().type() == kind, first_field, " = '", first.device().str(), "': must be on a ",
                      c10::DeviceTypeName(kind), " device");
    TORCH_CHECK_VALUE(tensor.device() == first.device(), field, " = '", tensor.device().str(), "': must be on ",
                      first.device().str(), ", as ", first_field, " is");
}

}  // namespace fragmeter
