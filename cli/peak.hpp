// What this machine can do at most, for the ratios that `tercet bench` reports: plain loops, each call one sample. A caller takes the best of
// several, for a busy neighbour only ever takes away.
#ifndef TERCET_CLI_PEAK_HPP_
#define TERCET_CLI_PEAK_HPP_

#include <cstdint>
#include <optional>
#include <string>

#include "tercet/tercet.hpp"

namespace tercet::cli {

// The loops of one target: one of Targets(), or where that is no instruction set of Highway's the best that is.
class Peak {
 public:
  explicit Peak(const std::string& target);

  // GFLOP/s of one core in multiply-adds between registers, f64 or f32; about a millisecond.
  double MultiplyAdds(bool f64) const;
  // Copies n floats.
  void Copy(const float* from, float* to, int64_t n) const;
  // Multiplies n floats in place, by one.
  void ReadMultiplyWrite(float* data, int64_t n) const;

  struct Loops;

 private:
  const Loops* loops_;
};

// Whether this core multiplies bf16 tiles (AMX) and the kernel lets us; if not, `why` is that in a few words.
bool HasTiles(std::string* why);
// GFLOP/s of one core in products of bf16 tiles between registers, where HasTiles.
double TileProducts();

}  // namespace tercet::cli

#endif  // TERCET_CLI_PEAK_HPP_
