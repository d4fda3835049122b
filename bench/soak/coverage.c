/* Which code of the extensions an input has reached; loaded before them by bench/soak/fuzz.py.
   gcc's -fsanitize-coverage=trace-pc calls the first function at every edge. */

#include <stdint.h>
#include <string.h>

enum { CELLS = 1 << 16 };

static uint8_t reached[CELLS];
static uint8_t known[CELLS];

__attribute__((no_sanitize_address)) void __sanitizer_cov_trace_pc(void)
{
    uintptr_t pc = (uintptr_t)__builtin_return_address(0);
    reached[(pc ^ pc >> 16) & (CELLS - 1)] = 1;
}

/* How many cells the code since the last call reached for the first time. */
int newly_reached(void)
{
    int fresh = 0;
    for (int i = 0; i < CELLS; i += 8) {
        uint64_t word;
        memcpy(&word, reached + i, 8);
        if (word == 0)
            continue;
        for (int j = i; j < i + 8; j++)
            if (reached[j] && !known[j]) {
                known[j] = 1;
                fresh++;
            }
        memset(reached + i, 0, 8);
    }
    return fresh;
}
