/* Callgrind's client requests as functions for ctypes. Outside valgrind they do nothing. */

#include <valgrind/callgrind.h>

int under_valgrind(void)
{
    return RUNNING_ON_VALGRIND != 0;
}

void start_counting(void)
{
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void zero_counts(void)
{
    CALLGRIND_ZERO_STATS;
}

void switch_collecting(void)
{
    CALLGRIND_TOGGLE_COLLECT;
}

void write_counts(const char *title)
{
    CALLGRIND_DUMP_STATS_AT(title);
}
