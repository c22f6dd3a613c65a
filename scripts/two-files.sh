# Sourced, with a Python: sets two, the options by which pytest runs two files at a time, or nothing where it has no pytest-xdist.
# Engines wait for half of the time, and the files that take longest should be named first.
# shellcheck shell=bash
two=()
! "${1:?}" -c 'import xdist' 2>/dev/null || two=(-n 2 --dist loadfile --no-loadscope-reorder)
