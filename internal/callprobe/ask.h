#ifndef CALLPROBE_ASK_H
#define CALLPROBE_ASK_H

// callprobe_ask says whether a process under this thread's filters survives a system call whose arguments are 0: 0 if it does, 1 if it
// does not, else -errno. hide is for kernels that end the caller too if it can be dumped.
int callprobe_ask(long call, int hide);

#endif
