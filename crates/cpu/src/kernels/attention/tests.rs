use super::oracle::{Cache, Step, attend_row};
use super::*;
use crate::kernels::kv_append::KvAppendArgs;
use crate::kernels::testing::{Random, Threads, bits, close};
use crate::parallel::Serial;
use qwen_formats::DType;

fn args(num_heads: usize, num_key_value_heads: usize, head_dim: usize, value_dim: usize) -> AttentionArgs {
    let scale = 3.0 / (head_dim as f32).sqrt();
    AttentionArgs {
        num_heads,
        num_key_value_heads,
        head_dim,
        value_dim,
        block_size: 16,
        scale,
        window: 0,
        products: Products::F32,
    }
}

fn cache_args(args: &AttentionArgs) -> KvAppendArgs {
    KvAppendArgs {
        num_key_value_heads: args.num_key_value_heads,
        head_dim: args.head_dim,
        value_dim: args.value_dim,
        block_size: args.block_size,
        joined: false,
    }
}

fn run(isa: Isa, parallel: &dyn Parallel, args: &AttentionArgs, q: &[f32], cache: &Cache, step: &Step) -> Vec<f32> {
    let rows = step.rows();
    let mut out = vec![7.0; rows * args.num_heads * args.value_dim];
    let limits = StepLimits {
        threads: parallel.threads(),
        sequences: step.context_len.len(),
        tokens: rows,
        max_context: *step.context_len.iter().max().unwrap() as usize,
    };
    let mut workspace = vec![0xa5; attention_workspace_bytes(args, &limits)];
    attention(
        isa,
        parallel,
        args,
        Matrix::dense(q, rows, args.num_heads * args.head_dim),
        cache.view(),
        &step.view(),
        MatrixMut::dense(&mut out, rows, args.num_heads * args.value_dim),
        &mut workspace,
    )
    .unwrap();
    out
}

fn oracle(args: &AttentionArgs, q: &[f32], cache: &Cache, sequences: &[(usize, usize)]) -> Vec<f64> {
    let mut out = Vec::new();
    let mut rows = q.chunks(args.head_dim);
    for (s, &(tokens, context)) in sequences.iter().enumerate() {
        for token in 0..tokens {
            let position = context - tokens + token;
            let first = if args.window == 0 { 0 } else { (position + 1).saturating_sub(args.window) };
            for head in 0..args.num_heads {
                let kv = head / (args.num_heads / args.num_key_value_heads);
                let keys: Vec<_> = (first..=position).map(|p| cache.key(s, p, kv)).collect();
                let values: Vec<_> = (first..=position).map(|p| cache.value(s, p, kv)).collect();
                out.extend(attend_row(rows.next().unwrap(), &keys, &values, args.scale.into()));
            }
        }
    }
    out
}

/// (heads, kv heads, head_dim, value_dim, block size, window, dtype)
type Shape = (usize, usize, usize, usize, usize, usize, DType);

const SHAPES: [Shape; 14] = [
    (9, 3, 64, 64, 16, 0, DType::F16),
    (12, 2, 128, 128, 16, 0, DType::BF16),
    (4, 4, 80, 80, 32, 0, DType::F32),
    (2, 1, 96, 96, 8, 100, DType::F16),
    (4, 2, 12, 12, 4, 0, DType::F32),
    (3, 1, 24, 40, 5, 7, DType::BF16),
    (7, 1, 16, 16, 64, 0, DType::F16),
    (14, 1, 192, 128, 16, 0, DType::F16),
    (1, 1, 256, 256, 16, 64, DType::F16),
    (50, 1, 8, 8, 16, 0, DType::F16),
    (9, 3, 64, 64, 16, 0, DType::BF16),
    (3, 1, 30, 48, 32, 7, DType::BF16),
    (6, 2, 64, 80, 48, 33, DType::BF16),
    (50, 1, 8, 16, 16, 64, DType::BF16),
];

/// All shapes, those of caches in pairs with either form of products.
fn cases() -> Vec<(AttentionArgs, DType)> {
    let shapes = SHAPES.into_iter().flat_map(|(heads, kv, head_dim, value_dim, block_size, window, dtype)| {
        let args = AttentionArgs { block_size, window, ..args(heads, kv, head_dim, value_dim) };
        let pairs = args.has_pairs(dtype).then_some((AttentionArgs { products: Products::Bf16, ..args }, dtype));
        std::iter::once((args, dtype)).chain(pairs)
    });
    shapes.collect()
}

#[test]
fn follows_the_formula_on_every_instruction_set() {
    for (i, (args, dtype)) in cases().into_iter().enumerate() {
        let mut random = Random::new(100 + i as u64);
        let sequences = [(1, 1), (5, 5), (1, 130), (20, 70), (0, 0), (3, 300)];
        let contexts = sequences.map(|s| s.1);
        let cache = Cache::random(cache_args(&args), dtype, &contexts, &mut random, &mut Random::new(5));
        let step = Step::new(&cache, &sequences);
        let q = random.values(step.rows() * args.num_heads * args.head_dim, 1.0);
        let expected = oracle(&args, &q, &cache, &sequences);
        let first = run(Isa::Scalar, &Serial, &args, &q, &cache, &step);
        // A rounding of a query or weight is off by 2^-9 of it at most.
        close(&first, &expected, if args.products == Products::Bf16 { 1e-2 } else { 3e-6 });
        for isa in Isa::available() {
            let out = run(isa, &Threads(3), &args, &q, &cache, &step);
            assert!(bits(&first) == bits(&out), "{args:?} {}", isa.name());
        }
    }
}

/// A prompt at once and the same prompt in pieces, each piece attending over what is cached by then.
#[test]
fn chunking_a_prompt_changes_no_bit() {
    for (i, (args, dtype)) in cases().into_iter().enumerate() {
        let mut random = Random::new(200 + i as u64);
        let prompt = random.range(300, 700);
        let width = args.num_heads * args.head_dim;
        let cache = Cache::random(cache_args(&args), dtype, &[prompt], &mut random, &mut Random::new(6));
        let q = random.values(prompt * width, 1.0);
        let whole = run(Isa::current(), &Threads(2), &args, &q, &cache, &Step::new(&cache, &[(prompt, prompt)]));
        for largest in [1, 7, 150] {
            let mut pieces = Vec::new();
            let mut done = 0;
            while done < prompt {
                let tokens = random.range(1, largest + 1).min(prompt - done);
                let step = Step::new(&cache, &[(tokens, done + tokens)]);
                let threads = Threads(random.range(1, 5));
                pieces.extend(run(
                    Isa::current(),
                    &threads,
                    &args,
                    &q[done * width..][..tokens * width],
                    &cache,
                    &step,
                ));
                done += tokens;
            }
            assert!(bits(&whole) == bits(&pieces), "{args:?} in pieces of up to {largest}");
        }
    }
}

/// Alone, in a batch of others, with blocks placed elsewhere, and on any number of threads.
#[test]
fn neighbours_blocks_and_threads_change_no_bit() {
    for (i, (args, dtype)) in cases().into_iter().enumerate() {
        let mut random = Random::new(300 + i as u64);
        let sequences: Vec<(usize, usize)> = (0..8)
            .map(|_| {
                let context = random.range(1, 900);
                (if random.range(0, 2) == 0 { 1 } else { random.range(1, context.min(40) + 1) }, context)
            })
            .collect();
        let contexts: Vec<usize> = sequences.iter().map(|s| s.1).collect();
        let cache = Cache::random(cache_args(&args), dtype, &contexts, &mut random, &mut Random::new(7));
        let step = Step::new(&cache, &sequences);
        let width = args.num_heads * args.head_dim;
        let q = random.values(step.rows() * width, 1.0);
        let batch = run(Isa::current(), &Serial, &args, &q, &cache, &step);
        for threads in [2, 3, 8] {
            let moved = cache.replaced(&mut random);
            let other = run(Isa::current(), &Threads(threads), &args, &q, &moved, &Step::new(&moved, &sequences));
            assert!(bits(&batch) == bits(&other), "{args:?} with {threads} threads");
        }
        for (s, &sequence) in sequences.iter().enumerate() {
            let alone = cache.alone(s, &mut random);
            let rows = step.query_start[s] as usize..step.query_start[s + 1] as usize;
            let q = &q[rows.start * width..rows.end * width];
            let out = run(Isa::current(), &Threads(4), &args, q, &alone, &Step::new(&alone, &[sequence]));
            let width = args.num_heads * args.value_dim;
            assert!(bits(&batch[rows.start * width..rows.end * width]) == bits(&out), "{args:?} sequence {s}");
        }
    }
}

/// Splits need workspace; without it a sequence is done whole, with the same bits.
#[test]
fn the_least_workspace_changes_no_bit_and_less_is_refused() {
    let args = args(6, 2, 64, 64);
    let mut random = Random::new(12);
    let cache = Cache::random(cache_args(&args), DType::F16, &[2000], &mut random, &mut Random::new(8));
    let step = Step::new(&cache, &[(1, 2000)]);
    let q = random.values(6 * 64, 1.0);
    let threads = Threads(4);
    let full = run(Isa::current(), &threads, &args, &q, &cache, &step);
    let limits = StepLimits { threads: 4, sequences: 1, tokens: 1, max_context: 0 };
    let least = attention_workspace_bytes(&args, &limits);
    let mut out = vec![0.0; 6 * 64];
    let mut small = |bytes: usize| {
        let mut workspace = vec![0; bytes];
        let (q, out) = (Matrix::dense(&q, 1, 384), MatrixMut::dense(&mut out, 1, 384));
        attention(Isa::current(), &threads, &args, q, cache.view(), &step.view(), out, &mut workspace)
    };
    assert!(matches!(small(least - 1), Err(KernelError::Workspace { .. })));
    small(least).unwrap();
    assert!(bits(&full) == bits(&out));
}

/// The first tile of this step sees the first split alone; whatever the workspace held before must not stand for the second.
#[test]
fn a_split_that_a_tile_does_not_see_changes_no_bit() {
    let args = args(9, 3, 64, 64);
    let mut random = Random::new(15);
    let cache = Cache::random(cache_args(&args), DType::F16, &[280], &mut random, &mut Random::new(11));
    let step = Step::new(&cache, &[(60, 280)]);
    let q = random.values(60 * 576, 1.0);
    let whole = run(Isa::current(), &Serial, &args, &q, &cache, &step);
    // Room as a server has it, which plans for longer contexts: only then are prompts split.
    let limits = StepLimits { threads: 2, sequences: 1, tokens: 60, max_context: 4096 };
    for before in [0, 0x7f, 0xff] {
        let mut workspace = vec![before; attention_workspace_bytes(&args, &limits)];
        let mut out = vec![0.0; 60 * 576];
        let (q, view) = (Matrix::dense(&q, 60, 576), MatrixMut::dense(&mut out, 60, 576));
        attention(Isa::current(), &Threads(2), &args, q, cache.view(), &step.view(), view, &mut workspace).unwrap();
        assert!(bits(&whole) == bits(&out), "a workspace of bytes {before:#x}");
    }
}

#[test]
fn nan_and_infinity_stay_in_their_row() {
    let args = args(2, 1, 32, 32);
    nan_stays(args, DType::F32);
    nan_stays(AttentionArgs { products: Products::Bf16, ..args }, DType::BF16);
}

fn nan_stays(args: AttentionArgs, dtype: DType) {
    let mut random = Random::new(13);
    let cache = Cache::random(cache_args(&args), dtype, &[400], &mut random, &mut Random::new(9));
    let step = Step::new(&cache, &[(10, 400)]);
    let mut q = random.values(10 * 64, 1.0);
    let clean = run(Isa::current(), &Threads(2), &args, &q, &cache, &step);
    q[3 * 64 + 5] = f32::NAN;
    q[7 * 64 + 40] = f32::INFINITY;
    let first = run(Isa::Scalar, &Serial, &args, &q, &cache, &step);
    for isa in Isa::available() {
        let out = run(isa, &Threads(2), &args, &q, &cache, &step);
        assert!(bits(&first) == bits(&out));
        for (i, row) in out.chunks(32).enumerate() {
            match i {
                6 | 15 => assert!(row.iter().all(|x| x.is_nan()), "head row {i}"),
                _ => assert_eq!(bits(row), bits(&clean[i * 32..][..32]), "head row {i}"),
            }
        }
    }
}

/// A later token's key and value may be anything: rows before it don't see it. Nor do rows whose window has passed it.
#[test]
fn nothing_beyond_a_row_reaches_it() {
    let args = args(4, 2, 16, 16);
    for (window, dtype, products) in [
        (0, DType::F32, Products::F32),
        (9, DType::F16, Products::F32),
        (0, DType::BF16, Products::F32),
        (0, DType::BF16, Products::Bf16),
        (9, DType::BF16, Products::Bf16),
        (10, DType::BF16, Products::Bf16),
    ] {
        let args = AttentionArgs { window, products, ..args };
        let mut random = Random::new(14);
        let cache = Cache::random(cache_args(&args), dtype, &[90], &mut random, &mut Random::new(10));
        let q = random.values(90 * 64, 1.0);
        let clean = run(Isa::current(), &Serial, &args, &q, &cache, &Step::new(&cache, &[(90, 90)]));
        for place in [69, 70] {
            let spoiled = cache.spoiled(0, place);
            let step = Step::new(&spoiled, &[(90, 90)]);
            let end = if window == 0 { 90 } else { place + window };
            for isa in Isa::available() {
                let out = run(isa, &Serial, &args, &q, &spoiled, &step);
                assert_eq!(bits(&out[..place * 64]), bits(&clean[..place * 64]), "{args:?} {place}");
                assert_eq!(bits(&out[end * 64..]), bits(&clean[end * 64..]), "{args:?} {place}");
                assert!(out[place * 64..end * 64].iter().all(|x| x.is_nan()), "{args:?} {place}");
            }
            // Token by token, as decode does it.
            for token in [place - 1, place, end - 1, end.min(89)] {
                let step = Step::new(&spoiled, &[(1, token + 1)]);
                let out = run(Isa::current(), &Serial, &args, &q[token * 64..][..64], &spoiled, &step);
                let seen = (place..end).contains(&token);
                assert!(seen && out.iter().all(|x| x.is_nan()) || bits(&out) == bits(&clean[token * 64..][..64]));
            }
        }
    }
}

/// Products of pairs are for caches in pairs alone.
#[test]
fn pairs_of_other_caches_are_refused() {
    let args = AttentionArgs { products: Products::Bf16, ..args(2, 1, 16, 16) };
    for (dtype, block_size) in [(DType::F16, 16), (DType::BF16, 8)] {
        let args = AttentionArgs { block_size, ..args };
        let cache = Cache::random(cache_args(&args), dtype, &[3], &mut Random::new(1), &mut Random::new(2));
        let (q, mut out, mut workspace) = ([0.5; 32], [0.0; 32], vec![0; 1 << 20]);
        let (q, view) = (Matrix::dense(&q, 1, 32), MatrixMut::dense(&mut out, 1, 32));
        let step = Step::new(&cache, &[(1, 3)]);
        let done = attention(Isa::current(), &Serial, &args, q, cache.view(), &step.view(), view, &mut workspace);
        assert!(matches!(done, Err(KernelError::Type { .. })), "{done:?}");
    }
}

#[test]
fn rows_of_no_sequence_become_zero() {
    let args = args(2, 1, 16, 16);
    let cache = Cache::random(cache_args(&args), DType::F32, &[3], &mut Random::new(1), &mut Random::new(2));
    let mut step = Step::new(&cache, &[(2, 3)]);
    let q = Random::new(3).values(5 * 32, 1.0);
    let mut out = vec![7.0; 5 * 32];
    let mut workspace = vec![0; 1 << 20];
    step.query_start = vec![1, 3];
    let (q, view) = (Matrix::dense(&q, 5, 32), MatrixMut::dense(&mut out, 5, 32));
    attention(Isa::current(), &Serial, &args, q, cache.view(), &step.view(), view, &mut workspace).unwrap();
    assert!(out[..32].iter().chain(&out[96..]).all(|&x| x == 0.0));
    assert!(out[32..96].iter().all(|&x| x != 7.0 && x.is_finite()));
}

#[test]
fn refuses_index_tensors_that_lead_outside() {
    let args = args(2, 1, 16, 16);
    let cache = Cache::random(cache_args(&args), DType::F32, &[40, 20], &mut Random::new(1), &mut Random::new(2));
    let good = || Step::new(&cache, &[(2, 40), (1, 20)]);
    let q = [0.5; 3 * 32];
    let refused = |change: &dyn Fn(&mut Step), args: &AttentionArgs| {
        let mut step = good();
        change(&mut step);
        let mut out = vec![0.0; 3 * 32];
        let mut workspace = vec![0; 1 << 20];
        let (q, out) = (Matrix::dense(&q, 3, 32), MatrixMut::dense(&mut out, 3, 32));
        attention(Isa::current(), &Serial, args, q, cache.view(), &step.view(), out, &mut workspace).err()
    };
    let index = |name: &str, change: &dyn Fn(&mut Step)| match refused(change, &args) {
        Some(KernelError::Index { what, .. }) => assert_eq!(what, name),
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(refused(&|_| {}, &args), None);
    for block in [-1, i32::MIN, 9, i32::MAX] {
        index("block_table", &|step| step.table[1] = block);
    }
    index("query_start", &|step| step.query_start[1] = -1);
    index("query_start", &|step| step.query_start[1] = 4);
    index("query_start", &|step| step.query_start[2] = 1);
    index("query_start", &|step| step.query_start[2] = i32::MAX);
    index("context_len", &|step| step.context_len[0] = 1);
    index("context_len", &|step| step.context_len[0] = -5);
    index("context_len", &|step| step.context_len[1] = i32::MAX);
    // Blocks that no row sees needn't exist.
    let window = AttentionArgs { window: 6, ..args };
    assert_eq!(refused(&|step| step.table[0] = -1, &window), None);
    assert!(refused(&|step| step.table[1] = -1, &window).is_none());
    assert!(refused(&|step| step.table[2] = -1, &window).is_some());
    // A sequence without queries isn't looked at.
    let empty = |step: &mut Step| {
        step.query_start = vec![0, 2, 2];
        step.context_len[1] = -9;
    };
    assert_eq!(refused(&empty, &args), None);
    for bad in [
        AttentionArgs { num_key_value_heads: 0, ..args },
        AttentionArgs { block_size: 0, ..args },
        AttentionArgs { block_size: 17, ..args },
        AttentionArgs { head_dim: 17, ..args },
        AttentionArgs { value_dim: 15, ..args },
    ] {
        assert!(matches!(refused(&|_| {}, &bad), Some(KernelError::Shape { .. })), "{bad:?}");
    }
}
