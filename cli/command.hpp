// The command as a function, for the program `tercet` and for the one that Python's package installs.
#ifndef TERCET_CLI_COMMAND_HPP_
#define TERCET_CLI_COMMAND_HPP_

namespace tercet::cli {

// Does what the arguments say (argv[0] is the program) and returns the exit code: 0 what was asked holds or was done, 1 a check failed, 2 bad use or
// a bad file.
int Run(int argc, char** argv);

}  // namespace tercet::cli

#endif  // TERCET_CLI_COMMAND_HPP_
