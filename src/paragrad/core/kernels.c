/* Fused passes over memory for the exchange. They bypass the cache if the processor can.
 *
 * Another core reads the results next, a whole vector later. A plain store would first read each cache line; a streaming
 * store does not. Each function returns 1 if its result is finite, else 0.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define STREAMING __attribute__((target("avx2")))
#define HAVE_STREAMING 1
#else
#define HAVE_STREAMING 0
#endif

/* The check for finite results: NaN or infinity times 0 is NaN, and a sum with NaN is NaN. */

/* out = now + scale * x; twin = out, if twin is not NULL */
static int add_plain(float *out, float *twin, const float *now, const float *x, float scale, size_t n)
{
    float zero = 0.0f;
    for (size_t i = 0; i < n; i++) {
        float value = now[i] + scale * x[i];
        out[i] = value;
        if (twin)
            twin[i] = value;
        zero += value * 0.0f;
    }
    return zero == 0.0f;
}

/* out = anchor = local = now + scale * (local - anchor) */
static int move_plain(float *out, float *anchor, float *local, const float *now, float scale, size_t n)
{
    float zero = 0.0f;
    for (size_t i = 0; i < n; i++) {
        float value = now[i] + scale * (local[i] - anchor[i]);
        out[i] = anchor[i] = local[i] = value;
        zero += value * 0.0f;
    }
    return zero == 0.0f;
}

/* force = share * (x - now); out = now + force */
static int approach_plain(float *out, float *force, const float *now, const float *x, float share, size_t n)
{
    float zero = 0.0f;
    for (size_t i = 0; i < n; i++) {
        float step = share * (x[i] - now[i]);
        force[i] = step;
        out[i] = now[i] + step;
        zero += out[i] * 0.0f;
    }
    return zero == 0.0f;
}

/* out = a * x + b * y */
static int blend_plain(float *out, const float *x, float a, const float *y, float b, size_t n)
{
    float zero = 0.0f;
    for (size_t i = 0; i < n; i++) {
        out[i] = a * x[i] + b * y[i];
        zero += out[i] * 0.0f;
    }
    return zero == 0.0f;
}

/* out = a - b */
static void subtract_plain(float *out, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = a[i] - b[i];
}

#if HAVE_STREAMING
static int aligned(const void *p)
{
    return ((uintptr_t)p & 31) == 0;
}

STREAMING static int all_zero(__m256 sum)
{
    float parts[8];
    int zero = 1;
    _mm256_storeu_ps(parts, sum);
    for (int k = 0; k < 8; k++)
        zero &= parts[k] == 0.0f;
    return zero;
}

STREAMING static int add_streaming(float *out, float *twin, const float *now, const float *x, float scale, size_t n)
{
    __m256 scales = _mm256_set1_ps(scale), zeros = _mm256_setzero_ps(), sum = zeros;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 value = _mm256_add_ps(_mm256_loadu_ps(now + i), _mm256_mul_ps(scales, _mm256_loadu_ps(x + i)));
        _mm256_stream_ps(out + i, value);
        if (twin)
            _mm256_stream_ps(twin + i, value);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(value, zeros));
    }
    _mm_sfence();
    return all_zero(sum) & add_plain(out + i, twin ? twin + i : NULL, now + i, x + i, scale, n - i);
}

STREAMING static int move_streaming(float *out, float *anchor, float *local, const float *now, float scale, size_t n)
{
    __m256 scales = _mm256_set1_ps(scale), zeros = _mm256_setzero_ps(), sum = zeros;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 moved = _mm256_sub_ps(_mm256_loadu_ps(local + i), _mm256_loadu_ps(anchor + i));
        __m256 value = _mm256_add_ps(_mm256_loadu_ps(now + i), _mm256_mul_ps(scales, moved));
        _mm256_stream_ps(out + i, value);
        /* these cache lines were just read: a plain store needs no further read */
        _mm256_store_ps(anchor + i, value);
        _mm256_store_ps(local + i, value);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(value, zeros));
    }
    _mm_sfence();
    return all_zero(sum) & move_plain(out + i, anchor + i, local + i, now + i, scale, n - i);
}

STREAMING static int approach_streaming(float *out, float *force, const float *now, const float *x, float share, size_t n)
{
    __m256 shares = _mm256_set1_ps(share), zeros = _mm256_setzero_ps(), sum = zeros;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 here = _mm256_loadu_ps(now + i);
        __m256 step = _mm256_mul_ps(shares, _mm256_sub_ps(_mm256_loadu_ps(x + i), here));
        __m256 value = _mm256_add_ps(here, step);
        _mm256_stream_ps(force + i, step);
        _mm256_stream_ps(out + i, value);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(value, zeros));
    }
    _mm_sfence();
    return all_zero(sum) & approach_plain(out + i, force + i, now + i, x + i, share, n - i);
}

STREAMING static int blend_streaming(float *out, const float *x, float a, const float *y, float b, size_t n)
{
    __m256 as = _mm256_set1_ps(a), bs = _mm256_set1_ps(b), zeros = _mm256_setzero_ps(), sum = zeros;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 value = _mm256_add_ps(_mm256_mul_ps(as, _mm256_loadu_ps(x + i)), _mm256_mul_ps(bs, _mm256_loadu_ps(y + i)));
        _mm256_stream_ps(out + i, value);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(value, zeros));
    }
    _mm_sfence();
    return all_zero(sum) & blend_plain(out + i, x + i, a, y + i, b, n - i);
}

STREAMING static void subtract_streaming(float *out, const float *a, const float *b, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_stream_ps(out + i, _mm256_sub_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
    _mm_sfence();
    subtract_plain(out + i, a + i, b + i, n - i);
}

/* Short vectors use plain stores: they stay in the cache and are read again at once. */
#define LONG 16384
#define CAN_STREAM(n) ((n) >= LONG && __builtin_cpu_supports("avx2"))
#endif

int paragrad_add(float *out, float *twin, const float *now, const float *x, float scale, size_t n)
{
#if HAVE_STREAMING
    if (CAN_STREAM(n) && aligned(out) && (!twin || aligned(twin)))
        return add_streaming(out, twin, now, x, scale, n);
#endif
    return add_plain(out, twin, now, x, scale, n);
}

int paragrad_move(float *out, float *anchor, float *local, const float *now, float scale, size_t n)
{
#if HAVE_STREAMING
    if (CAN_STREAM(n) && aligned(out) && aligned(anchor) && aligned(local))
        return move_streaming(out, anchor, local, now, scale, n);
#endif
    return move_plain(out, anchor, local, now, scale, n);
}

int paragrad_approach(float *out, float *force, const float *now, const float *x, float share, size_t n)
{
#if HAVE_STREAMING
    if (CAN_STREAM(n) && aligned(out) && aligned(force))
        return approach_streaming(out, force, now, x, share, n);
#endif
    return approach_plain(out, force, now, x, share, n);
}

int paragrad_blend(float *out, const float *x, float a, const float *y, float b, size_t n)
{
#if HAVE_STREAMING
    if (CAN_STREAM(n) && aligned(out))
        return blend_streaming(out, x, a, y, b, n);
#endif
    return blend_plain(out, x, a, y, b, n);
}

int paragrad_subtract(float *out, const float *a, const float *b, size_t n)
{
#if HAVE_STREAMING
    if (CAN_STREAM(n) && aligned(out)) {
        subtract_streaming(out, a, b, n);
        return 1;
    }
#endif
    subtract_plain(out, a, b, n);
    return 1;
}
