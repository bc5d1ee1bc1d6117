/* Kernels of the toy model of toy.py, and a launch loop with a barrier. VOCABULARY, MAX_BLOCKS, BLOCK_TOKENS and DRAFTS are given. */
#include <sched.h>
#include <stdint.h>

typedef void (*kernel)(void **, int64_t, int64_t);
typedef struct { kernel run; void **buffers; } launch;

static void barrier_wait(int64_t *barrier, int64_t workers) {
  int64_t turn = __atomic_load_n(&barrier[1], __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&barrier[0], 1, __ATOMIC_ACQ_REL) == workers) {
    __atomic_store_n(&barrier[0], 0, __ATOMIC_RELAXED);
    __atomic_store_n(&barrier[1], turn + 1, __ATOMIC_RELEASE);
  } else {
    while (__atomic_load_n(&barrier[1], __ATOMIC_ACQUIRE) == turn) sched_yield();
  }
}

void tapeout_execute(const void *launches, int64_t count, int64_t worker, int64_t workers, int64_t *barrier) {
  const launch *all = launches;
  for (int64_t i = 0; i < count; i++) {
    all[i].run(all[i].buffers, worker, workers);
    if (i + 1 < count && workers > 1) barrier_wait(barrier, workers);
  }
}

static uint64_t mix(uint64_t x) {
  x ^= x >> 30; x *= 0xBF58476D1CE4E5B9ull; x ^= x >> 27; x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/* out[i] = a[i] + b[i]; buffers a, b, out (i32), count */
void toy_add(void **p, int64_t worker, int64_t workers) {
  const int32_t *a = p[0], *b = p[1], *count = p[3];
  int32_t *out = p[2];
  for (int64_t i = worker; i < *count; i += workers) out[i] = a[i] + b[i];
}

/* out[i] = a[(i + 1) % count] + 1: every element comes from another worker's share of the launch before */
void toy_shift(void **p, int64_t worker, int64_t workers) {
  const int32_t *a = p[0], *count = p[2];
  int32_t *out = p[1];
  for (int64_t i = worker; i < *count; i += workers) out[i] = a[(i + 1) % *count] + 1;
}

/* tokens, positions, slots, block_table, last -> patched, entry_rows; rows */
void toy_step(void **p, int64_t worker, int64_t workers) {
  const int32_t *tokens = p[0], *positions = p[1], *slots = p[2], *table = p[3], *last = p[4], *rows = p[7];
  int32_t *patched = p[5], *entries = p[6];
  for (int64_t r = worker; r < *rows; r += workers) {
    patched[r] = tokens[r] < 0 ? last[slots[r]] : tokens[r];
    entries[r] = table[slots[r] * MAX_BLOCKS + positions[r] / BLOCK_TOKENS] * BLOCK_TOKENS + positions[r] % BLOCK_TOKENS;
  }
}

/* patched, embed [V], scratch (arena) -> scratch; rows */
void toy_embed(void **p, int64_t worker, int64_t workers) {
  const int32_t *tokens = p[0], *embed = p[1], *rows = p[3];
  int32_t *scratch = p[2];
  for (int64_t r = worker; r < *rows; r += workers) scratch[r] = embed[tokens[r]];
}

/* scratch, entry_rows, state -> state, streams; rows */
void toy_append(void **p, int64_t worker, int64_t workers) {
  const int32_t *scratch = p[0], *entries = p[1], *rows = p[4];
  int32_t *state = p[2], *streams = p[3];
  for (int64_t r = worker; r < *rows; r += workers) { state[entries[r]] = scratch[r]; streams[r] = scratch[r]; }
}

/* streams, kept, outputs, positions, slots, block_table, state, kept_starts, kept_ends -> logits; outputs count.
   A logit hashes the embeddings of all tokens up to the row with their positions. */
void toy_decode(void **p, int64_t worker, int64_t workers) {
  const int32_t *streams = p[0], *kept = p[1], *outputs = p[2], *positions = p[3], *slots = p[4], *table = p[5], *state = p[6];
  const int32_t *starts = p[7], *ends = p[8], *count = p[10];
  float *logits = p[9];
  for (int64_t o = worker; o < *count; o += workers) {
    int32_t r = kept[outputs[o]];
    uint64_t h = (starts[outputs[o]] <= r && r < ends[outputs[o]]) ? 1 : 0;
    for (int32_t u = 0; u < positions[r]; u++)
      h = mix(h * 31 + (uint64_t)state[table[slots[r] * MAX_BLOCKS + u / BLOCK_TOKENS] * BLOCK_TOKENS + u % BLOCK_TOKENS] * 1000 + u);
    h = mix(h * 31 + (uint64_t)streams[r] * 1000 + positions[r]);
    for (int64_t v = 0; v < VOCABULARY; v++) logits[o * VOCABULARY + v] = (float)(mix(h + v) % 4096) / 512.0f;
  }
}

/* logits, temperature, seeds, sample_slots, sample_positions, last -> last, sampled, logprobs; outputs count */
void toy_sample(void **p, int64_t worker, int64_t workers) {
  const float *logits = p[0], *temperature = p[1];
  const int64_t *seeds = p[2];
  const int32_t *slots = p[3], *positions = p[4], *count = p[8];
  int32_t *last = p[5], *sampled = p[6];
  float *logprobs = p[7];
  for (int64_t o = worker; o < *count; o += workers) {
    int32_t best = 0; float most = -1e30f;
    for (int32_t v = 0; v < VOCABULARY; v++) {
      float noise = (float)(mix(mix((uint64_t)seeds[o] ^ mix(positions[o])) + v) % 4096) / 512.0f;
      float score = logits[o * VOCABULARY + v] + temperature[o] * noise;
      if (score > most) { most = score; best = v; }
    }
    sampled[o] = last[slots[o]] = best;
    logprobs[o] = best ? -(float)best - 0.25f : -20000.0f;
  }
}

/* sampled, golden_rows, draft_positions -> drafts, confidences; sequences count */
void toy_draft(void **p, int64_t worker, int64_t workers) {
  const int32_t *sampled = p[0], *golden = p[1], *positions = p[2], *count = p[5];
  int32_t *drafts = p[3];
  float *confidences = p[4];
  for (int64_t s = worker; s < *count; s += workers)
    for (int32_t j = 0; j < DRAFTS; j++) {
      drafts[s * DRAFTS + j] = (sampled[golden[s]] + j + 1) % VOCABULARY;
      confidences[s * DRAFTS + j] = (float)positions[s] + 0.125f * j;
    }
}
