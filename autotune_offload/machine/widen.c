/* One pass over a gradient partition: widen to fp32, keep it as it is, and sum the squares in fp64.
 *
 * Sixteen partial sums let the compiler keep them in vector registers; they are added up every BLOCK
 * elements, so that rounding does not pile up along a large partition. The square of an fp32 value is
 * exact in fp64 (24 + 24 bits in 53), so that only the additions round. `restrict` is the caller's
 * promise that source and destinations do not overlap; `keep` may be null.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 4096

#define ONE_PASS(NAME, FROM, WIDEN)                                                     \
    static inline __attribute__((always_inline)) double NAME##_block(                   \
        float *restrict to, const FROM *restrict from, FROM *restrict keep, ptrdiff_t count) \
    {                                                                                   \
        double sums[LANES] = {0};                                                       \
        ptrdiff_t whole = count - count % LANES;                                        \
        for (ptrdiff_t i = 0; i < whole; i += LANES) {                                  \
            float values[LANES];                                                        \
            WIDEN(values, from + i);                                                    \
            if (keep)                                                                   \
                memcpy(keep + i, from + i, LANES * sizeof(FROM));                       \
            for (int lane = 0; lane < LANES; lane++) {                                  \
                to[i + lane] = values[lane];                                            \
                sums[lane] += (double)values[lane] * (double)values[lane];              \
            }                                                                           \
        }                                                                               \
        if (whole < count) {                                                            \
            FROM rest[LANES] = {0};                                                     \
            float values[LANES];                                                        \
            memcpy(rest, from + whole, (size_t)(count - whole) * sizeof(FROM));         \
            WIDEN(values, rest);                                                        \
            memcpy(to + whole, values, (size_t)(count - whole) * sizeof(float));        \
            if (keep)                                                                   \
                memcpy(keep + whole, from + whole, (size_t)(count - whole) * sizeof(FROM)); \
            for (int lane = 0; lane < LANES; lane++)                                    \
                sums[lane] += (double)values[lane] * (double)values[lane];              \
        }                                                                               \
        double total = 0;                                                               \
        for (int lane = 0; lane < LANES; lane++)                                        \
            total += sums[lane];                                                        \
        return total;                                                                   \
    }                                                                                   \
                                                                                        \
    double NAME(float *restrict to, const FROM *restrict from, FROM *restrict keep, ptrdiff_t count) \
    {                                                                                   \
        double total = 0;                                                               \
        for (ptrdiff_t start = 0; start < count; start += BLOCK) {                      \
            ptrdiff_t left = count - start, size = left < BLOCK ? left : BLOCK;         \
            total += keep ? NAME##_block(to + start, from + start, keep + start, size)  \
                          : NAME##_block(to + start, from + start, (FROM *)0, size);    \
        }                                                                               \
        return total;                                                                   \
    }

static inline void from_bfloat16(float *values, const uint16_t *bits)
{
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t wide = (uint32_t)bits[lane] << 16;
        memcpy(values + lane, &wide, sizeof wide);
    }
}

static inline void from_float32(float *values, const float *same)
{
    memcpy(values, same, LANES * sizeof(float));
}

ONE_PASS(widen_bfloat16, uint16_t, from_bfloat16)
ONE_PASS(widen_float32, float, from_float32)

#if defined(__F16C__) /* GCC leaves a loop over _Float16 scalar here: 20 times as slow */
#include <immintrin.h>
static inline void from_float16(float *values, const uint16_t *bits)
{
    for (int lane = 0; lane < LANES; lane += 8)
        _mm256_storeu_ps(values + lane, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(bits + lane))));
}
ONE_PASS(widen_float16, uint16_t, from_float16)
#elif defined(__aarch64__)
static inline void from_float16(float *values, const __fp16 *halves)
{
    for (int lane = 0; lane < LANES; lane++)
        values[lane] = (float)halves[lane];
}
ONE_PASS(widen_float16, __fp16, from_float16)
#endif
