#include "cli/terminal.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace tercet::cli {
namespace {

// Bytes of the UTF-8 character at the front of `text` that may be shown as it is, or 0.
size_t Printable(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || length > text.size()) return 0;
  unsigned code = first & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0u) != 0x80u) return 0;
    code = code << 6 | (byte(i) & 0x3fu);
  }
  if (code < 0xa0) return 0;                       // the second set of control characters
  if (code >= 0x202a && code <= 0x202e) return 0;  // these two turn the direction of the text about
  if (code >= 0x2066 && code <= 0x2069) return 0;
  if (code >= 0xd800 && code <= 0xdfff) return 0;  // no characters
  if ((length == 3 && code < 0x800) || (length == 4 && (code < 0x10000 || code > 0x10ffff))) return 0;
  return length;
}

bool Coloured() {
  static const bool coloured = [] {
    const char* off = std::getenv("NO_COLOR");
    return isatty(STDOUT_FILENO) != 0 && (off == nullptr || *off == '\0');
  }();
  return coloured;
}

}  // namespace

std::string Escape(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t length = Printable(text);
    if (length > 0)
      out += text.substr(0, length);
    else
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

std::string Bold(std::string_view text) { return Coloured() ? fmt::format("\x1b[1m{}\x1b[0m", text) : std::string(text); }

std::string TrueFalse(bool value) {
  const std::string_view word = value ? "True" : "False";
  return Coloured() ? fmt::format("\x1b[{}m{}\x1b[0m", value ? 32 : 31, word) : std::string(word);
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0), next_(Clock::now() + std::chrono::seconds(1)) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void Progress::Update(double fraction, std::string_view doing) {
  if (!terminal_ || Clock::now() < next_) return;
  next_ = Clock::now() + std::chrono::milliseconds(100);
  drawn_ = true;
  constexpr int kWidth = 30;
  const double part = fraction > 0 ? std::min(fraction, 1.0) : 0.0;
  const int full = static_cast<int>(part * kWidth);
  fmt::print(stderr, "\r\x1b[K[{:#>{}}{:->{}}] {:3.0f} % {}", "", full, "", kWidth - full, part * 100, Escape(doing));
  std::fflush(stderr);
}

}  // namespace tercet::cli
