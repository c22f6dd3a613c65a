/* The list of groups. */
#include "groups.h"

const struct group groups[] = {
    {"before-start", before_start, true}, {"none-visible", none_visible, true}, {"none-valid", none_valid, true},
    {"devices", devices, false},          {"contexts", contexts, false},
    {"threads", threads, false},          {"allocations", allocations, false},   {"host-touch", host_touch, false},
    {"pointers", pointers, false},        {"streams", streams, false},           {"waits", waits, false},
    {"two-contexts", two_contexts, false}, {"green-contexts", green_contexts, false}, {"copies", copies, false},            {"batches", batches, false},
    {"batches-astray", batches_astray, false},
    {"kernels", kernels, false},          {"kernels-astray", kernels_astray, false},
    {"captures", captures, false},        {"mapped", mapped, false},             {"exports", exports, false},
    {"pools", pools, false},              {"same-host", same_host, false},
    {"opened-elsewhere", opened_elsewhere, false}, {"mapped-elsewhere", mapped_elsewhere, false},
    {"destroyed-streams", destroyed_streams, false}, /* last: nothing says that a driver ends these calls */
};
const size_t group_count = sizeof groups / sizeof *groups;
