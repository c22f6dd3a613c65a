#include "test.h"

int main(void) {
  static const struct {
    const char *name;
    void (*run)(void);
  } tests[] = {{"memory", test_memory}, {"pointers", test_pointers}, {"mapped", test_mapped}, {"imported", test_imported}, {"export", test_export}, {"order", test_order}, {"races", test_races},
               {"queue", test_queue}, {"one connection", test_one_connection}, {"green", test_green}, {"legacy", test_legacy},     {"capture", test_capture}, {"end", test_end}, {"faults", test_faults}};
  CUdeviceptr p;
  FAILS(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc_v2(&p, 1));
  OK(cuInit(0));
  size_t n = sizeof tests / sizeof *tests;
  for (size_t i = 0; i < n; i++) {
    tests[i].run();
    EXPECT(kvgpu_count("allocations") == 0 && kvgpu_count("streams") == 0 && kvgpu_count("events") == 0 && kvgpu_count("pinned") == 0);
    EXPECT(kvgpu_count("contexts") == 0 && kvgpu_count("handles") == 0 && kvgpu_count("captures") == 0);
    EXPECT(kvgpu_count("mapped") == 0 && kvgpu_count("reserved") == 0 && kvgpu_count("ipc") == 0);
    printf("ok %s\n", tests[i].name);
  }
  return 0;
}
