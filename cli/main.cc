// tercet: the command.
#include "cli/command.hpp"

int main(int argc, char** argv) { return tercet::cli::Run(argc, argv); }
