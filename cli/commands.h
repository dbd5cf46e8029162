#pragma once

// One function per command of `baton`. argv[0] is the command's name. Returns the process's exit
// code.

namespace baton::cli {

int RunServe(int argc, char** argv);
int RunGenerate(int argc, char** argv);
int RunChat(int argc, char** argv);
int RunStatus(int argc, char** argv);
int RunBench(int argc, char** argv);
int RunSim(int argc, char** argv);
int RunTokenize(int argc, char** argv);
int RunRender(int argc, char** argv);
int RunKvSize(int argc, char** argv);
int RunCheckConfig(int argc, char** argv);

}  // namespace baton::cli
