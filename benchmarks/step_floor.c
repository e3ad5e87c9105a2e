/* The least that a step with 16-bit weights must read and write, 30 bytes a parameter, and no arithmetic to speak of. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void step_floor(float *restrict weights, const float *restrict gradients, float *restrict first,
                float *restrict second, uint16_t *restrict rounded, ptrdiff_t count)
{
    for (ptrdiff_t at = 0; at < count; at += 1024) {
        ptrdiff_t end = count - at < 1024 ? count : at + 1024;
        for (ptrdiff_t i = at; i < end; i++) {
            first[i] += gradients[i];
            second[i] += gradients[i];
            weights[i] += first[i];
        }
        for (ptrdiff_t i = at; i < end; i++) {
            uint32_t bits;
            memcpy(&bits, weights + i, sizeof bits);
            rounded[i] = (uint16_t)(bits >> 16);
        }
    }
}
