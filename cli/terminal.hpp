// What goes to a person's screen: escaped text, colour where it is wanted, a progress bar that keeps quiet where nobody watches.
#ifndef TERCET_CLI_TERMINAL_HPP_
#define TERCET_CLI_TERMINAL_HPP_

#include <chrono>
#include <string>
#include <string_view>

namespace tercet::cli {

// `text` with control characters and bytes that are not UTF-8 written as \xNN: names from files and arguments can't steer a terminal.
std::string Escape(std::string_view text);

// Colours when stdout is a terminal and NO_COLOR is unset, else plain text.
std::string Bold(std::string_view text);
std::string TrueFalse(bool value);

// A bar on stderr, drawn only if that is a terminal and the work has taken over a second; gone when the work ends.
class Progress {
 public:
  Progress();
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void Update(double fraction, std::string_view doing);

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point next_;
};

}  // namespace tercet::cli

#endif  // TERCET_CLI_TERMINAL_HPP_
