// Run by the scheduler on what the lanes have left on their stacks, so never instrumented.
#include "mma_host.h"

#include <cmath>
#include <limits>

namespace cuda_host {

namespace {

float towards_zero(double value) {
  if (!std::isfinite(value)) return static_cast<float>(value);
  const float rounded = static_cast<float>(value);
  if (std::isinf(rounded)) {
    return std::fabs(value) < 0x1p128 ? std::copysign(std::numeric_limits<float>::max(), rounded) : rounded;
  }
  return std::fabs(static_cast<double>(rounded)) > std::fabs(value) ? std::nextafter(rounded, 0.0f) : rounded;
}

// Number k of the row or column that the lanes 4 * line .. 4 * line + 3 hold in word `low` (k < half) and `high`.
double number(void* const* lanes, Operand kind, bool of_a, int line, int k, int low, int high) {
  const int half = kind == Operand::kTf32 ? 4 : 8, per_word = half / 4;
  const auto& lane = *static_cast<const MmaLane*>(lanes[4 * line + k % half / per_word]);
  const int word = k < half ? low : high;
  const unsigned bits = of_a ? lane.a[word] : lane.b[word];
  if (kind == Operand::kTf32) return __uint_as_float(bits & 0xffffe000u);  // 13 bits are not looked at
  const auto part = static_cast<uint16_t>(k % 2 ? bits >> 16 : bits);
  return kind == Operand::kHalf ? half_value(part) : bfloat16_value(part);
}

}  // namespace

void run_mma(void* const* lanes) {
  const Operand kind = static_cast<const MmaLane*>(lanes[0])->kind;
  const int depth = kind == Operand::kTf32 ? 8 : 16;
  double a[16][16], b[16][8];
  for (int k = 0; k < depth; ++k) {
    for (int row = 0; row < 16; ++row) a[row][k] = number(lanes, kind, true, row % 8, k, row / 8, row / 8 + 2);
    for (int column = 0; column < 8; ++column) b[k][column] = number(lanes, kind, false, column, k, 0, 1);
  }
  for (int i = 0; i < 32; ++i) {
    auto& lane = *static_cast<MmaLane*>(lanes[i]);
    for (int j = 0; j < 4; ++j) {
      const int row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
      double sum = lane.d[j];
      for (int k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
      lane.d[j] = towards_zero(sum);
    }
  }
}

void run_ldmatrix_transposed(void* const* lanes) {
  for (int i = 0; i < 32; ++i) {
    auto& lane = *static_cast<MatrixLane*>(lanes[i]);
    for (int matrix = 0; matrix < 4; ++matrix) {
      // Numbers (row 2t, column g) and (row 2t + 1, column g) of the matrix in memory.
      unsigned pair[2];
      for (int j = 0; j < 2; ++j) {
        const auto& owner = *static_cast<const MatrixLane*>(lanes[8 * matrix + i % 4 * 2 + j]);
        pair[j] = owner.row[i / 4 / 2] >> (i / 4 % 2 * 16) & 0xffffu;
      }
      lane.result[matrix] = pair[0] | pair[1] << 16;
    }
  }
}

}  // namespace cuda_host
