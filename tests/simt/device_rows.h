#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/fp8.h"
#include "engine/ops/cuda/kernels.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"

namespace baton::simt {

using ops::cuda::Element;

// Device rows in one of the elements that linear layers read, and how far they may be off.
class DeviceRows {
 public:
  DeviceRows(Element element, int tokens, int width)
      : element_(element),
        tokens_(tokens),
        width_(width),
        pitch_((tokens + 3) / 4 * 4),
        data_(static_cast<size_t>(tokens) * width * Bytes(element)),
        scales_(static_cast<size_t>(width / 128 + 1) * pitch_) {
    scales_.Fill();  // a column may end behind the last token
  }

  ops::cuda::LinearRows view() {
    return {.data = data_.data(),
            .element = element_,
            .scales = element_ == Element::kFp8 ? scales_.data() : nullptr,
            .pitch = pitch_};
  }

  // `want` [tokens][width]; `error`: relative, of the f32 arithmetic before the rounding. Rows with
  // a value that is not finite: all their codes must be 0 and the scale of that group NaN.
  void Check(const std::vector<double>& want, double error) {
    const std::vector<uint8_t> bytes = data_.Get();
    const std::vector<float> scales = scales_.Get();
    for (int t = 0; t < tokens_; ++t) {
      for (int i = 0; i < width_; ++i) {
        const size_t at = static_cast<size_t>(t) * width_ + i;
        const double value = want[at];
        if (element_ == Element::kFp8) {
          CheckCode(bytes[at], scales[i / 128 * pitch_ + t], &want[at - i % 128], i % 128, error);
        } else if (element_ == Element::kBf16) {
          uint16_t bits;
          std::memcpy(&bits, &bytes[2 * at], 2);
          CheckValue(base::FloatFromBf16(bits), value, error + 0x1p-8);
        } else {
          float got;
          std::memcpy(&got, &bytes[4 * at], 4);
          CheckValue(got, value, error);
        }
        if (testing::Test::HasFailure()) {
          ADD_FAILURE() << "token " << t << " column " << i;
          return;
        }
      }
    }
  }

 private:
  static size_t Bytes(Element element) {
    return element == Element::kF32 ? 4 : element == Element::kBf16 ? 2 : 1;
  }

  static void CheckValue(double got, double want, double error) {
    if (std::isfinite(want)) {
      EXPECT_NEAR(got, want, std::fabs(want) * error + 1e-37);
    } else {
      EXPECT_FALSE(std::isfinite(got));
    }
  }

  static void CheckCode(uint8_t code, float scale, const double* group, int i, double error) {
    double largest = 0;
    bool finite = true;
    for (int k = 0; k < 128; ++k) {
      finite = finite && std::isfinite(group[k]);
      largest = std::max(largest, std::fabs(group[k]));
    }
    if (!finite) {
      EXPECT_TRUE(std::isnan(scale));
      EXPECT_EQ(code, 0);
      return;
    }
    EXPECT_NEAR(scale, largest / 448, largest / 448 * (error + 0x1p-23) + 1e-33);
    if (scale == 0) {
      EXPECT_EQ(code, 0);
      return;
    }
    const double value = group[i] / scale, slack = std::fabs(value) * (error + 0x1p-22);
    const float got = base::FloatFromFp8(code);
    EXPECT_GE(got, base::FloatFromFp8(base::Fp8FromFloat(static_cast<float>(value - slack))));
    EXPECT_LE(got, base::FloatFromFp8(base::Fp8FromFloat(static_cast<float>(value + slack))));
  }

  Element element_;
  int tokens_, width_;
  int64_t pitch_;
  DeviceArray<uint8_t> data_;
  DeviceArray<float> scales_;
};

}  // namespace baton::simt
