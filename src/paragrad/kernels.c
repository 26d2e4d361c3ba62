/* The exchange's two passes over memory, each fused into one and written past the cache where that is possible.
 *
 * A commit is read once and its answer written once, by two processes: what is stored here is not read again by
 * the core that stores it, so streaming stores save the read of every line that a plain store would begin with.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define STREAMING 1
#else
#define STREAMING 0
#endif

/* out = now + scale * x; twin = home = out where they are not NULL. Returns 1 if the result is finite throughout, else 0. */
static int add_plain(float *out, float *twin, float *home, const float *now, const float *x, float scale, size_t n)
{
    float zero = 0.0f;
    for (size_t i = 0; i < n; i++) {
        float value = now[i] + scale * x[i];
        out[i] = value;
        if (twin)
            twin[i] = value;
        if (home)
            home[i] = value;
        zero += value * 0.0f; /* NaN or infinity times 0 is NaN, and stays */
    }
    return zero == 0.0f;
}

static void subtract_plain(float *out, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = a[i] - b[i];
}

#if STREAMING
static size_t until_aligned(const float *p, size_t n)
{
    size_t head = ((32 - ((uintptr_t)p & 31)) & 31) / sizeof(float);
    return head < n ? head : n;
}

__attribute__((target("avx2"))) static int add_streaming(
    float *out, float *twin, float *home, const float *now, const float *x, float scale, size_t n)
{
    size_t i = until_aligned(out, n);
    int finite = add_plain(out, twin, home, now, x, scale, i);
    __m256 scales = _mm256_set1_ps(scale), zeros = _mm256_setzero_ps(), sum = zeros;
    for (; i + 8 <= n; i += 8) {
        __m256 xs = _mm256_loadu_ps(x + i);
        __m256 values = _mm256_add_ps(_mm256_loadu_ps(now + i), _mm256_mul_ps(scales, xs));
        _mm256_stream_ps(out + i, values);
        if (twin)
            _mm256_stream_ps(twin + i, values);
        if (home)
            _mm256_stream_ps(home + i, values);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(values, zeros));
    }
    _mm_sfence();
    float parts[8];
    _mm256_storeu_ps(parts, sum);
    for (int k = 0; k < 8; k++)
        finite &= parts[k] == 0.0f;
    return finite & add_plain(out + i, twin ? twin + i : NULL, home ? home + i : NULL, now + i, x + i, scale, n - i);
}

__attribute__((target("avx2"))) static void subtract_streaming(float *out, const float *a, const float *b, size_t n)
{
    size_t i = until_aligned(out, n);
    subtract_plain(out, a, b, i);
    for (; i + 8 <= n; i += 8)
        _mm256_stream_ps(out + i, _mm256_sub_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
    _mm_sfence();
    subtract_plain(out + i, a + i, b + i, n - i);
}
#endif

int paragrad_add(float *out, float *twin, float *home, const float *now, const float *x, float scale, size_t n)
{
#if STREAMING
    int alike = (!twin || (((uintptr_t)out ^ (uintptr_t)twin) & 31) == 0) && (!home || (((uintptr_t)out ^ (uintptr_t)home) & 31) == 0);
    if (alike && __builtin_cpu_supports("avx2"))
        return add_streaming(out, twin, home, now, x, scale, n);
#endif
    return add_plain(out, twin, home, now, x, scale, n);
}

void paragrad_subtract(float *out, const float *a, const float *b, size_t n)
{
#if STREAMING
    if (__builtin_cpu_supports("avx2")) {
        subtract_streaming(out, a, b, n);
        return;
    }
#endif
    subtract_plain(out, a, b, n);
}
