//! Loading fixtures on the CPU.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of this module")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qwen_engine::{Engine, EngineError, FinishReason, LoadOptions, LoadedModel, Policy, Request, SamplingParams};
use qwen_formats::{Checkpoint, DType};
use qwen_hal::{Device, Host, Plugin, Pool};

/// A path below `fixtures/`.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

/// The CPU with a pool of so many threads.
pub fn cpu(threads: usize) -> Device {
    let host = Host::new(Arc::new(Pool::new(Some(threads))));
    Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap()
}

/// Defaults for tiny models: no smaller buckets than needed, exact precision.
pub fn exact() -> LoadOptions {
    LoadOptions { policy: Policy::Exact, ..LoadOptions::default() }
}

/// A fixture ready to generate.
pub fn engine(path: &str, options: &LoadOptions, threads: usize) -> Engine {
    try_engine(path, options, threads).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A fixture ready to generate, or why not.
pub fn try_engine(path: &str, options: &LoadOptions, threads: usize) -> Result<Engine, EngineError> {
    LoadedModel::load(&fixture(path), cpu(threads), options, &mut |_| {}).map(Engine::new)
}

/// Reference made by another library.
pub struct Reference {
    pub input_ids: Vec<u32>,
    /// [n, vocab].
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

pub fn reference(path: &str) -> Reference {
    let file = Checkpoint::open(&fixture(path)).unwrap();
    let bytes = |name: &str| file.tensor(name).map(|view| view.data.to_vec());
    let ids = |name: &str| -> Vec<u32> {
        let info = file.info(name);
        assert!(info.is_none_or(|info| info.dtype == DType::I32), "{name} of {path}");
        let bytes = bytes(name).unwrap_or_default();
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let logits = bytes("logits").unwrap().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    Reference { input_ids: ids("input_ids"), logits, greedy: ids("greedy") }
}

/// Logits of every position.
pub fn logits(engine: &mut Engine, tokens: &[u32], decode: bool) -> Vec<f32> {
    let mut all = Vec::new();
    engine.logits(tokens, decode, &mut |row| all.extend_from_slice(row)).unwrap();
    all
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

pub fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_tokens, ignore_eos: true, ..SamplingParams::default() }
}

/// Runs all requests to the end; tokens per request, in order of submission.
pub fn run(engine: &mut Engine, requests: Vec<Request>) -> Vec<Vec<u32>> {
    let ids: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    let mut tokens = vec![Vec::new(); ids.len()];
    let mut steps = 0;
    while engine.has_work() {
        for output in engine.step() {
            let at = ids.iter().position(|id| *id == output.id).unwrap();
            tokens[at].extend(output.token);
            assert!(
                !matches!(
                    output.finish,
                    Some(FinishReason::Logits(_) | FinishReason::Error(_) | FinishReason::Device(_))
                ),
                "{output:?}"
            );
        }
        steps += 1;
        assert!(steps < 10_000, "the engine makes no progress");
    }
    tokens
}
