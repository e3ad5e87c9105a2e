/* One pass over a piece of an optimizer step: scale the gradient, Adam or AdamW in fp32, round to 16 bits.
 *
 * Every operation is the one that DeepSpeed's vectorized CPU Adam does per element, in its order, with a fused
 * multiply-add where it has one and none elsewhere (compiled with -ffp-contract=off): the bits are the same
 * whatever the width of the vectors. What DeepSpeed leaves to its scalar loop is not done here.
 *
 * A block of BLOCK elements stays in the first-level cache between the loops over it, so that memory is read
 * and written once.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024

struct constants {
    float scale, beta1, beta2, rest1, rest2, bias2, epsilon, step_size, decay;
    int32_t scales;  /* 0: the gradient stays as it is */
    int32_t decays;  /* 0: none, 1: of the weight (AdamW), 2: added to the gradient (Adam) */
};

/* In float throughout, as DeepSpeed has it: a product in double would round twice. */
void adam_constants(struct constants *to, float scale, float beta1, float beta2, float beta1_t, float beta2_t,
                    float rate, float epsilon, float weight_decay, int32_t corrects, int32_t decoupled)
{
    float bias1 = 1.0f, bias2 = 1.0f;
    if (corrects) {
        bias1 = 1.0f - beta1_t;
        bias2 = 1.0f / sqrtf(1.0f - beta2_t);
    }
    to->scale = scale;
    to->scales = scale != 1.0f;
    to->beta1 = beta1;
    to->beta2 = beta2;
    to->rest1 = 1.0f - beta1;
    to->rest2 = 1.0f - beta2;
    to->bias2 = bias2;
    to->epsilon = epsilon;
    to->step_size = -1.0f * rate / bias1;
    to->decays = weight_decay > 0.0f ? (decoupled ? 1 : 2) : 0;
    to->decay = decoupled ? -1.0f * rate * weight_decay : weight_decay;
}

/* Whether this thread flushes subnormal numbers to zero: other threads would not. */
int32_t flushes_subnormals(void)
{
#if defined(__x86_64__)
    return (__builtin_ia32_stmxcsr() & 0x8040u) != 0;
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return (control & (1u << 24)) != 0;
#else
    return 0;
#endif
}

/* Without a fused multiply-add in hardware DeepSpeed's own loop is scalar, and rounds otherwise. */
#if defined(__FMA__) || defined(__aarch64__)

#define ADAM(NAME, WITH_GRADIENT, WITH_WEIGHT)                                                       \
    static void NAME(float *restrict weights, const float *restrict gradients, float *restrict first, \
                     float *restrict second, ptrdiff_t count, const struct constants *c)             \
    {                                                                                                \
        const float beta1 = c->beta1, beta2 = c->beta2, rest1 = c->rest1, rest2 = c->rest2;          \
        const float bias2 = c->bias2, epsilon = c->epsilon, step_size = c->step_size;                \
        const float decay = c->decay;                                                                \
        (void)decay;                                                                                 \
        for (ptrdiff_t i = 0; i < count; i++) {                                                      \
            float weight = weights[i], gradient = gradients[i];                                      \
            WITH_GRADIENT;                                                                           \
            float momentum = __builtin_fmaf(gradient, rest1, first[i] * beta1);                      \
            float variance = __builtin_fmaf(gradient * gradient, rest2, second[i] * beta2);          \
            float update = momentum / __builtin_fmaf(__builtin_sqrtf(variance), bias2, epsilon);     \
            WITH_WEIGHT;                                                                             \
            weights[i] = __builtin_fmaf(update, step_size, weight);                                  \
            first[i] = momentum;                                                                     \
            second[i] = variance;                                                                    \
        }                                                                                            \
    }

ADAM(adam_plain, (void)0, (void)0)
ADAM(adam_decoupled, (void)0, weight = __builtin_fmaf(weight, decay, weight))
ADAM(adam_coupled, gradient = __builtin_fmaf(weight, decay, gradient), (void)0)

/* To the nearest, ties to even; a NaN becomes the one that torch's vectorized copy writes. */
static void to_bfloat16(uint16_t *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0xffffu : rounded);
    }
}

static void to_float32(float *restrict to, const float *restrict from, ptrdiff_t count)
{
    memcpy(to, from, (size_t)count * sizeof(float));
}

static void to_nothing(char *to, const float *from, ptrdiff_t count)
{
    (void)to, (void)from, (void)count;
}

#if defined(__F16C__) /* GCC leaves a loop over _Float16 scalar here */
#include <immintrin.h>
static void to_float16(uint16_t *restrict to, const float *restrict from, ptrdiff_t count)
{
    ptrdiff_t whole = count - count % 8;
    for (ptrdiff_t i = 0; i < whole; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
    for (ptrdiff_t i = whole; i < count; i++)
        to[i] = _cvtss_sh(from[i], 0);
}
#elif defined(__aarch64__)
static void to_float16(__fp16 *restrict to, const float *restrict from, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++)
        to[i] = (__fp16)from[i];
}
#endif

/* `done` is set when the piece is whole, whatever becomes of the caller in between. */
#define PIECE(NAME, TO, ROUND)                                                                       \
    void NAME(float *weights, float *gradients, float *first, float *second, TO *rounded,            \
              ptrdiff_t count, const struct constants *c, volatile uint8_t *done)                    \
    {                                                                                                \
        for (ptrdiff_t at = 0; at < count; at += BLOCK) {                                            \
            ptrdiff_t here = count - at < BLOCK ? count - at : BLOCK;                                \
            float *gradient = gradients + at;                                                        \
            if (c->scales)                                                                           \
                for (ptrdiff_t i = 0; i < here; i++)                                                 \
                    gradient[i] *= c->scale;                                                         \
            (c->decays == 1 ? adam_decoupled : c->decays == 2 ? adam_coupled : adam_plain)(          \
                weights + at, gradient, first + at, second + at, here, c);                           \
            ROUND(rounded + at, weights + at, here);                                                 \
        }                                                                                            \
        *done = 1;                                                                                   \
    }

PIECE(adam_to_none, char, to_nothing)
PIECE(adam_to_bfloat16, uint16_t, to_bfloat16)
PIECE(adam_to_float32, float, to_float32)
#if defined(__F16C__)
PIECE(adam_to_float16, uint16_t, to_float16)
#elif defined(__aarch64__)
PIECE(adam_to_float16, __fp16, to_float16)
#endif

#endif
