//! The host's own time, measured on a device that computes nothing.
#![allow(clippy::unwrap_used, reason = "a helper of tests and measurements")]

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qwen_engine::{Engine, LoadOptions, LoadedModel, Request, SamplingParams};
use qwen_hal::abi::{QHAL_USAGE_ACTIVATION, ops};
use qwen_hal::{
    BufferDesc, Device, Dim, Host, LaunchArgs, OpDesc, Patches, PlanOptions, Plugin, Pool, Scope, TensorDesc,
};

/// Layers of the model.
pub(crate) const LAYERS: usize = 30;
/// Launches of a step of SmolLM2-135M.
const COMMANDS: usize = 304;
/// Its vocabulary, which is what sampling works on.
pub(crate) const VOCABULARY: usize = 49152;

pub(crate) fn device() -> Device {
    let host = Host::new(Arc::new(Pool::new(Some(1))));
    Plugin::linked(&hal_null::PLUGIN, &host).unwrap().open(0, &[]).unwrap()
}

/// Writes a Llama checkpoint of 30 layers, all zeros: the shape of SmolLM2-135M, narrower, as widths cost the host nothing.
pub(crate) fn checkpoint(folder: &Path) {
    let (hidden, inner, heads, kv_heads) = (64, 128, 9, 3);
    let head = 8;
    let config = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": {hidden},
            "intermediate_size": {inner}, "num_hidden_layers": {LAYERS}, "num_attention_heads": {heads},
            "num_key_value_heads": {kv_heads}, "head_dim": {head}, "vocab_size": {VOCABULARY},
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": true, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}}"#
    );
    std::fs::write(folder.join("config.json"), config).unwrap();
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![VOCABULARY, hidden]),
        ("model.norm.weight".into(), vec![hidden]),
    ];
    for layer in 0..LAYERS {
        let mut add =
            |name: &str, shape: &[usize]| tensors.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
        add("self_attn.q_proj", &[heads * head, hidden]);
        add("self_attn.k_proj", &[kv_heads * head, hidden]);
        add("self_attn.v_proj", &[kv_heads * head, hidden]);
        add("self_attn.o_proj", &[hidden, heads * head]);
        add("mlp.gate_proj", &[inner, hidden]);
        add("mlp.up_proj", &[inner, hidden]);
        add("mlp.down_proj", &[hidden, inner]);
    }
    let (mut entries, mut offset) = (Vec::new(), 0);
    for (name, shape) in &tensors {
        let end = offset + shape.iter().product::<usize>() * 2;
        entries.push(format!(r#""{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{offset},{end}]}}"#));
        offset = end;
    }
    let mut header = format!("{{{}}}", entries.join(","));
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(&vec![0; offset]).unwrap();
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Nanoseconds of one launch of an op with one input and one output, checks of the host included: median of 21 runs.
pub(crate) fn launch_ns() -> f64 {
    const LAUNCHES: u32 = 10_000;
    let device = device();
    let stream = device.stream("s").unwrap();
    let x = TensorDesc::f32(&[Dim::symbol(0, 1, 8), 64.into()]);
    let plan = device.plan(&OpDesc::new(ops::QHAL_OP_SOFTMAX).input(x).output(x), &PlanOptions::default()).unwrap();
    let buffer = device.alloc(&BufferDesc::new(4096, QHAL_USAGE_ACTIVATION, Scope::Temporary, "x")).unwrap();
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &buffer.slice(0, 2048).unwrap()).set_output(0, &buffer.slice(2048, 2048).unwrap());
    let run = |_| {
        let start = Instant::now();
        for rows in 0..LAUNCHES {
            args.set_symbol(0, i64::from(1 + rows % 8));
            plan.launch(&stream, &args).unwrap();
        }
        start.elapsed()
    };
    median((0..21).map(run).collect()).as_secs_f64() * 1e9 / f64::from(LAUNCHES)
}

/// Median nanoseconds of a launch of a replayed list as long as a step: as it was recorded, and with another number of rows in each.
pub(crate) fn replay_ns() -> [f64; 2] {
    let device = device();
    let stream = device.stream("s").unwrap();
    let x = TensorDesc::f32(&[Dim::symbol(0, 1, 8), 64.into()]);
    let op = OpDesc::new(ops::QHAL_OP_SOFTMAX).input(x).output(x);
    let plan = Arc::new(device.plan(&op, &PlanOptions::default()).unwrap());
    let buffer = device.alloc(&BufferDesc::new(4096, QHAL_USAGE_ACTIVATION, Scope::Temporary, "x")).unwrap();
    let mut args = LaunchArgs::new(&plan);
    args.set_input(0, &buffer.slice(0, 2048).unwrap()).set_output(0, &buffer.slice(2048, 2048).unwrap());
    let mut recorder = device.record().unwrap();
    for _ in 0..COMMANDS {
        recorder.launch(&plan, &args).unwrap();
    }
    let mut list = recorder.finish().unwrap();
    let mut patches = Patches::new();
    let mut measure = |rows: Option<i64>| {
        let run = |_| {
            let start = Instant::now();
            for command in 0..rows.map_or(0, |_| COMMANDS) {
                patches.symbol(command, 0, rows.unwrap_or(1));
            }
            list.replay(&stream, &patches).unwrap();
            start.elapsed()
        };
        median((0..201).map(run).collect()).as_secs_f64() * 1e9 / COMMANDS as f64
    };
    [measure(None), measure(Some(5))]
}

/// Median time of a decoding step of one sequence over the 30 layers, sampling included.
pub(crate) fn step(sampling: &SamplingParams) -> Duration {
    let folder = tempfile::tempdir().unwrap();
    checkpoint(folder.path());
    let options = LoadOptions { max_seq_len: Some(1024), ..LoadOptions::default() };
    let mut engine = Engine::new(LoadedModel::load(folder.path(), device(), &options, &mut |_| {}).unwrap());
    engine.submit(Request::new(vec![5; 8], sampling.clone())).unwrap();
    let mut times = Vec::new();
    for _ in 0..300 {
        let start = Instant::now();
        engine.step();
        times.push(start.elapsed());
    }
    median(times.split_off(20))
}
