//! Configs and graphs of every fixture, of well-known models by their published sizes, and of models that must be refused.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use qwen_formats::gguf::{Array, Value as Gguf};
use qwen_formats::{Checkpoint, DType, GgufMetadata};
use qwen_ir::passes::{CompileOptions, PermissiveDevice, compile};
use qwen_ir::{Graph, Op, Phase, RopeStyle, Symbol, SymbolBounds, Transform};
use qwen_models::family::{
    Dialect, FAMILIES, FeedForward, ModelConfig, ModelError, ModelInfo, RopeScaling, TensorIndex,
    add_generation_config, build_graph, from_gguf, from_hf, read_config,
};
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// Every checkpoint of the fixtures: directories of models/, files of gguf/ (the first part of a split one).
fn checkpoints() -> Vec<(String, PathBuf)> {
    let list = |directory: &str| {
        let entries = std::fs::read_dir(fixtures().join(directory)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let gguf = list("gguf").into_iter().filter(|path| path.extension().is_some_and(|e| e == "gguf"));
    let models = list("models").into_iter().filter(|path| path.is_dir());
    let split = list("gguf/split").into_iter().filter(|path| path.to_string_lossy().contains("-00001-of-"));
    let name = |path: &Path| {
        let parent = path.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned();
        format!("{parent}/{}", path.file_stem().unwrap().to_string_lossy())
    };
    let mut all: Vec<_> = models.chain(gguf).chain(split).map(|path| (name(&path), path)).collect();
    all.sort();
    all
}

fn open(path: &Path) -> (ModelConfig, TensorIndex) {
    let checkpoint = Checkpoint::open(path).unwrap();
    (read_config(&checkpoint).unwrap(), TensorIndex::from(&checkpoint))
}

fn fixture(name: &str) -> (ModelConfig, TensorIndex) {
    open(&fixtures().join(name))
}

fn fixture_json(name: &str) -> Value {
    let text = std::fs::read_to_string(fixtures().join("models").join(name).join("config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A readable account of a graph: nodes by template, then weights with what becomes of their tensors.
fn summary(config: &ModelConfig, graph: &Graph) -> String {
    let mut text = String::new();
    let info = ModelInfo::new(config, graph);
    let _ = writeln!(text, "{}: {} parameters, {}", graph.name, info.parameters, info.quantization());
    for state in &graph.states {
        let _ = writeln!(text, "state {} x{} {:?}", state.name, state.layers, state.layout);
    }
    let bodies = graph.templates.iter().map(|template| (template.name.as_str(), &template.body));
    for (name, body) in bodies.chain([("main", &graph.body)]) {
        let _ = writeln!(text, "{name}:");
        for id in &body.nodes {
            let node = graph.node(*id);
            let detail = match &node.op {
                Op::Input { .. } | Op::Weight(_) | Op::Const { .. } => continue,
                Op::Rope(rope) => format!(
                    " {}x{} {}+{} {:?}",
                    rope.num_heads, rope.head_dim, rope.rotary_offset, rope.rotary_dim, rope.style
                ),
                Op::Attention { attention, .. } if attention.window > 0 => format!(" window {}", attention.window),
                Op::Route { route, bias } => format!(
                    " {:?} {} of {}, {} of {} groups by {:?}, renormalise {}, scale {}, bias {bias}",
                    route.score,
                    route.top_k,
                    route.num_experts,
                    route.topk_group,
                    route.num_groups,
                    route.group_score,
                    route.renormalise,
                    route.scale
                ),
                Op::Gemm { biases, scales, .. } if biases.contains(&true) || scales.contains(&true) => {
                    format!(" bias {} scale {}", biases.contains(&true), scales.contains(&true))
                }
                Op::Layers { template, first, count } => {
                    format!(" {} {first}..{}", graph.template(*template).name, first + count)
                }
                _ => String::new(),
            };
            let _ = writeln!(text, "  {}: {}{detail}", node.attributes.origin, node.op.name());
        }
    }
    for weight in &graph.weights {
        let used = weight.sources.iter().filter(|source| !source.tensors.is_empty());
        let mut kinds: Vec<String> =
            used.map(|source| format!("{} {:?} of {}", source.dtype, source.transform, source.tensors.len())).collect();
        kinds.dedup();
        let first = weight.first_layer.map_or_else(String::new, |first| format!(" from layer {first}"));
        let _ = writeln!(text, "  {} {:?}{first}: {}", weight.name, weight.shape, kinds.join("; "));
    }
    text
}

#[test]
fn every_fixture_builds_and_uses_each_tensor_once() {
    let all = checkpoints();
    assert!(all.len() >= 30, "only {} fixtures found", all.len());
    for (name, path) in all {
        let (config, tensors) = open(&path);
        let graph = build_graph(&config, &tensors).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut uses: BTreeMap<&str, usize> = BTreeMap::new();
        for tensor in graph.weights.iter().flat_map(|w| &w.sources).flat_map(|source| &source.tensors) {
            *uses.entry(tensor).or_default() += 1;
        }
        for (tensor, _) in tensors.iter().filter(|(tensor, _)| *tensor != "rope_freqs.weight") {
            assert_eq!(uses.remove(tensor), Some(1), "{name}: {tensor}");
        }
        assert!(uses.is_empty(), "{name}: {uses:?}");
        qwen_ir::verify(&graph).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = qwen_ir::text::print(&graph);
        let again = qwen_ir::parse::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(qwen_ir::text::print(&again), text, "{name}");
        for phase in [Phase::Prefill, Phase::Decode] {
            let bounds = SymbolBounds::default().with(Symbol::Tokens, 1, 64).with(Symbol::Sequences, 1, 8);
            let bounds = bounds.with(Symbol::Rows, 1, 8).with(Symbol::Blocks, 1, 16).with(Symbol::CacheBlocks, 1, 64);
            let options = CompileOptions { verify: true, ..CompileOptions::new(phase, bounds) };
            compile(&graph, &options, &PermissiveDevice).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let layers = config.num_hidden_layers;
        assert_eq!(graph.states.iter().map(|state| state.layers).sum::<u32>(), layers, "{name}");
    }
}

#[test]
fn graphs_of_the_fixtures() {
    for (name, path) in checkpoints() {
        // One file per block type has the same graph: one of them is enough.
        if name.contains("llama-q") && !name.ends_with("gguf/llama-q4_k") || name.contains("llama-iq") {
            continue;
        }
        let (config, tensors) = open(&path);
        let text = summary(&config, &build_graph(&config, &tensors).unwrap());
        insta::assert_snapshot!(name.replace('/', "_"), text);
    }
}

#[test]
fn gguf_and_json_describe_the_same_model() {
    let pairs = [
        ("models/llama", "gguf/llama.gguf"),
        ("models/llama_linear", "gguf/llama-tied-bf16.gguf"),
        ("models/qwen2", "gguf/qwen2.gguf"),
        ("models/qwen2_moe_uniform", "gguf/qwen2moe.gguf"),
        ("models/qwen3", "gguf/qwen3.gguf"),
        ("models/qwen3_moe", "gguf/qwen3moe.gguf"),
        ("models/deepseek_v2", "gguf/deepseek2-v2-kv_b.gguf"),
        ("models/deepseek_v3", "gguf/deepseek2-v3-split.gguf"),
    ];
    for (hf, gguf) in pairs {
        let (left, mut right) = (fixture(hf).0, fixture(gguf).0);
        assert_eq!(right.dialect, Dialect::Gguf);
        // GGUF stores f32, llama rows in another order, and llama3 scaling as a table.
        assert!((left.rms_norm_eps - right.rms_norm_eps).abs() < 1e-12, "{gguf}");
        assert!((left.softmax_scale() - right.softmax_scale()).abs() < 1e-7, "{gguf}");
        assert!((left.rope.attention_factor() - right.rope.attention_factor()).abs() < 1e-7, "{gguf}");
        let tables = left.rope.inverse_frequencies().into_iter().zip(right.rope.inverse_frequencies());
        for (i, (a, b)) in tables.enumerate() {
            assert!((a - b).abs() <= 4e-7 * a.abs(), "{gguf}: frequency {i}: {a} and {b}");
        }
        right.dialect = left.dialect;
        right.rms_norm_eps = left.rms_norm_eps;
        right.rope = left.rope.clone();
        // generation_config.json may name more.
        assert!(right.eos_token_ids.iter().all(|id| left.eos_token_ids.contains(id)), "{gguf}");
        right.eos_token_ids.clone_from(&left.eos_token_ids);
        assert_eq!(left, right, "{gguf}");
    }
}

#[test]
fn rotary_styles() {
    let style = |name| fixture(name).0.rope.style;
    assert_eq!(style("models/llama"), RopeStyle::Half);
    assert_eq!(style("gguf/llama.gguf"), RopeStyle::Interleaved);
    assert_eq!(style("gguf/qwen3.gguf"), RopeStyle::Half);
    assert_eq!(style("models/deepseek_v3"), RopeStyle::Interleaved);
    assert_eq!(style("gguf/deepseek2-v3-split.gguf"), RopeStyle::Interleaved);
}

#[test]
fn rotary_tables_equal_those_of_transformers() {
    let text = include_str!("family/rope_reference.json");
    let reference: Value = serde_json::from_str(text).unwrap();
    let cases = reference["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 11);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let config = from_hf(&case["config"].to_string()).unwrap_or_else(|error| panic!("{name}: {error}"));
        let table = config.rope.inverse_frequencies();
        let wanted: Vec<f64> = case["inv_freq"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        assert_eq!(table.len(), wanted.len(), "{name}");
        for (i, (value, wanted)) in table.iter().zip(&wanted).enumerate() {
            // 3 units in the last place: the reference's vectorised power is not correctly rounded.
            let error = (f64::from(*value) - wanted).abs();
            assert!(error <= 3.6e-7 * wanted.abs(), "{name}: frequency {i}: {value}, expected {wanted}");
        }
        let factor = case["attention_factor"].as_f64().unwrap();
        assert!((config.rope.attention_factor() - factor).abs() < 1e-12, "{name}: attention factor");
        let scale = case["softmax_scale"].as_f64().unwrap();
        assert!((config.softmax_scale() - scale).abs() < 1e-12, "{name}: softmax scale");
    }
}

#[test]
fn both_spellings_of_rope_parameters() {
    let mut old = fixture_json("llama");
    let expected = from_hf(&old.to_string()).unwrap();
    assert!(matches!(expected.rope.scaling, RopeScaling::Llama3 { .. }));
    let mut rope = old.as_object_mut().unwrap().remove("rope_scaling").unwrap();
    rope["rope_theta"] = old.as_object_mut().unwrap().remove("rope_theta").unwrap();
    let with = |value: Value| {
        let mut new = old.clone();
        new["rope_parameters"] = value;
        from_hf(&new.to_string())
    };
    assert_eq!(with(rope.clone()).unwrap(), expected);
    assert_eq!(with(json!({ "full_attention": rope, "sliding_attention": rope })).unwrap(), expected);
    let mut other = rope.clone();
    other["factor"] = json!(2.0);
    let error = with(json!({ "full_attention": rope, "sliding_attention": other })).unwrap_err();
    assert!(error.to_string().contains("different ones per layer type"), "{error}");
    // The oldest spelling of the kind.
    let mut oldest = rope;
    let kind = oldest.as_object_mut().unwrap().remove("rope_type").unwrap();
    oldest["type"] = kind;
    assert_eq!(with(oldest).unwrap(), expected);
}

#[test]
fn null_is_absent_and_harmless_keys_are_ignored() {
    let mut config = fixture_json("qwen2");
    let expected = from_hf(&config.to_string()).unwrap();
    for key in ["rope_scaling", "quantization_config", "head_dim", "layer_types", "attn_logit_softcapping"] {
        config[key] = Value::Null;
    }
    config["pretraining_tp"] = json!(4);
    config["auto_map"] = json!({ "AutoModel": "evil.Model" });
    config["_name_or_path"] = json!("somewhere");
    assert_eq!(from_hf(&config.to_string()).unwrap(), expected);
}

#[test]
fn layers_of_mixed_models() {
    let kinds = |name| -> Vec<String> { fixture(name).0.layers.iter().map(|layer| layer.name()).collect() };
    assert_eq!(kinds("models/qwen2_moe"), ["dense", "moe", "dense", "dense"]);
    assert_eq!(kinds("models/deepseek_v3"), ["dense", "moe"]);
    assert_eq!(kinds("models/qwen2_window"), ["dense", "dense", "dense_window8", "dense_window8"]);
    let mut config = fixture_json("qwen2_window");
    config["layer_types"] = json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
    let config = from_hf(&config.to_string()).unwrap();
    assert_eq!(config.layers.iter().map(|layer| layer.window).collect::<Vec<_>>(), [8, 0, 0, 0]);
}

#[test]
fn end_of_text_tokens_of_both_files() {
    let mut config = fixture("models/llama").0;
    config.eos_token_ids = vec![2];
    add_generation_config(&mut config, r#"{"eos_token_id": [7, 2, 9]}"#).unwrap();
    assert_eq!(config.eos_token_ids, [7, 2, 9]);
    add_generation_config(&mut config, r#"{"eos_token_id": 3}"#).unwrap();
    assert_eq!(config.eos_token_ids, [3, 7, 2, 9]);
    let error = add_generation_config(&mut config, r#"{"eos_token_id": [-1]}"#).unwrap_err();
    insta::assert_snapshot!(error, @"eos_token_id: expected token ids, found -1; the config is damaged or was edited, download it again");
}

fn edited(name: &str, edits: &[(&str, Value)]) -> Result<ModelConfig, ModelError> {
    let mut config = fixture_json(name);
    for (path, value) in edits {
        let mut place = &mut config;
        for key in path.split('.') {
            place = &mut place[key];
        }
        *place = value.clone();
    }
    from_hf(&config.to_string())
}

#[test]
fn refused_configs() {
    let cases: Vec<(&str, &str, Value)> = vec![
        ("llama", "architectures", json!(["GemmaForCausalLM"])),
        ("llama", "architectures", json!(["\u{1b}[31mX".repeat(100)])),
        ("llama", "text_config", json!({})),
        ("llama", "hidden_act", json!("gelu")),
        ("llama", "rope_scaling.rope_type", json!("longrope")),
        ("llama", "rope_scaling.rope_type", json!("dynamic")),
        ("llama", "rope_scaling.factor", json!(0)),
        ("llama", "rope_scaling.high_freq_factor", json!(1)),
        ("llama", "rope_scaling", json!("yarn")),
        ("llama", "rope_theta", json!("10000")),
        ("llama", "partial_rotary_factor", json!(0.5)),
        ("llama", "attn_logit_softcapping", json!(50.0)),
        ("llama", "num_experts", json!(8)),
        ("llama", "num_attention_heads", json!(0)),
        ("llama", "num_attention_heads", json!(-4)),
        ("llama", "num_attention_heads", json!(65)),
        ("llama", "num_key_value_heads", json!(3)),
        ("llama", "num_hidden_layers", json!(9_223_372_036_854_775_808_u64)),
        ("llama", "num_hidden_layers", json!(1.5)),
        ("llama", "hidden_size", json!(1e300)),
        ("llama", "head_dim", json!(15)),
        ("llama", "vocab_size", json!([])),
        ("llama", "rms_norm_eps", json!(-1e-6)),
        ("llama", "rms_norm_eps", json!("NaN")),
        ("llama", "max_position_embeddings", json!(null)),
        ("llama", "layer_types", json!(["chunked_attention", "full_attention"])),
        ("llama", "layer_types", json!(["full_attention"])),
        ("llama", "quantization_config", json!({ "quant_method": "awq", "bits": 4 })),
        ("llama", "quantization_config", json!({ "quant_method": "gptq", "bits": 4 })),
        ("llama", "quantization_config", json!({ "quant_method": "compressed-tensors" })),
        ("llama", "quantization_config", json!({ "bits": 4 })),
        ("llama", "quantization_config", json!({ "quant_method": "fp8" })),
        ("deepseek_v3_fp8", "quantization_config.weight_block_size", json!([64, 64])),
        ("deepseek_v3_fp8", "quantization_config.fmt", json!("e5m2")),
        ("deepseek_v3_fp8", "quantization_config.activation_scheme", json!("static")),
        ("qwen2_moe", "use_sliding_window", json!(true)),
        ("qwen2_moe", "decoder_sparse_step", json!(0)),
        ("qwen2_moe", "num_experts_per_tok", json!(13)),
        ("qwen2_moe", "mlp_only_layers", json!(["x"])),
        ("deepseek_v2", "topk_method", json!("noaux_tc")),
        ("deepseek_v2", "norm_topk_prob", json!(true)),
        ("deepseek_v3", "scoring_func", json!("softmax")),
        ("deepseek_v3", "n_group", json!(5)),
        ("deepseek_v3", "n_group", json!(16)),
        ("deepseek_v3", "topk_group", json!(9)),
        ("deepseek_v3", "num_experts_per_tok", json!(9)),
        ("deepseek_v3", "n_shared_experts", json!(60_000)),
        ("deepseek_v3", "qk_rope_head_dim", json!(7)),
        ("deepseek_v3", "kv_lora_rank", json!(null)),
    ];
    let mut text = String::new();
    for (fixture, key, value) in cases {
        let shown: String = value.to_string().chars().take(60).collect();
        match edited(fixture, &[(key, value)]) {
            Ok(_) => panic!("{fixture} with {key} = {shown} was accepted"),
            Err(error) => {
                let _ = writeln!(text, "{fixture} {key} = {shown}\n  {error}");
            }
        }
    }
    for broken in ["", "[]", "{", "{\"architectures\": 1}", "{}", &"[".repeat(5000)] {
        let error = from_hf(broken).unwrap_err();
        let _ = writeln!(text, "{:.20}\n  {error}", broken);
    }
    insta::assert_snapshot!(text);
}

#[test]
fn refused_metadata() {
    let cases = [
        ("llama.gguf", "general.architecture", Gguf::String(b"gemma3".as_slice().into())),
        ("llama.gguf", "general.architecture", Gguf::U32(1)),
        ("llama.gguf", "llama.expert_count", Gguf::U32(8)),
        ("llama.gguf", "llama.attention.sliding_window", Gguf::U32(100)),
        ("llama.gguf", "llama.attention.value_length", Gguf::U32(8)),
        ("llama.gguf", "llama.attention.head_count_kv", Gguf::Array(Array::I32(vec![2, 1]))),
        ("llama.gguf", "llama.attention.layer_norm_rms_epsilon", Gguf::F32(f32::NAN)),
        ("llama.gguf", "llama.attn_logit_softcapping", Gguf::F32(30.0)),
        ("llama.gguf", "llama.rope.scaling.type", Gguf::String(b"longrope".as_slice().into())),
        ("llama.gguf", "llama.rope.dimension_count", Gguf::U32(18)),
        ("llama.gguf", "llama.block_count", Gguf::U64(1 << 63)),
        ("deepseek2-v3-split.gguf", "deepseek2.expert_gating_func", Gguf::U32(3)),
        ("deepseek2-v3-split.gguf", "deepseek2.attention.key_length_mla", Gguf::U32(8)),
        ("qwen3moe.gguf", "qwen3moe.expert_used_count", Gguf::U32(0)),
        ("qwen3.gguf", "tokenizer.ggml.eos_token_id", Gguf::I32(-1)),
    ];
    let mut text = String::new();
    for (file, key, value) in cases {
        let path = fixtures().join("gguf").join(file);
        let checkpoint = Checkpoint::open(&path).unwrap();
        // Messages of the container name the file: a short one.
        let mut metadata = GgufMetadata::new(Path::new(file));
        for (key, value) in checkpoint.metadata().unwrap().iter() {
            metadata.insert(key.to_owned(), value.clone());
        }
        let shown = value.describe();
        metadata.insert(key.to_owned(), value);
        let error = from_gguf(&metadata, &TensorIndex::from(&checkpoint), None).unwrap_err();
        let _ = writeln!(text, "{key} = {shown}\n  {error}");
    }
    insta::assert_snapshot!(text);
}

#[test]
fn one_number_per_layer_is_accepted_if_all_are_alike() {
    let (config, tensors) = fixture("gguf/qwen3.gguf");
    let checkpoint = Checkpoint::open(&fixtures().join("gguf/qwen3.gguf")).unwrap();
    let mut metadata = checkpoint.metadata().unwrap().clone();
    metadata.insert("qwen3.attention.head_count_kv".into(), Gguf::Array(Array::U32(vec![2, 2])));
    assert_eq!(from_gguf(&metadata, &tensors, None).unwrap(), config);
}

#[test]
fn errors_name_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        std::fs::copy(fixtures().join("models/llama").join(name), directory.path().join(name)).unwrap();
    };
    copy("model.safetensors");
    let read = || read_config(&Checkpoint::open(directory.path()).unwrap());
    let error = read().unwrap_err().to_string();
    assert!(error.contains("config.json: can't be read"), "{error}");
    std::fs::write(directory.path().join("config.json"), "{}").unwrap();
    let error = read().unwrap_err().to_string();
    assert!(error.contains("config.json: architectures is missing"), "{error}");
    std::fs::write(directory.path().join("config.json"), " ".repeat(5 << 20)).unwrap();
    let error = read().unwrap_err().to_string();
    assert!(error.contains("at most 4194304 bytes, found 5242880"), "{error}");
    copy("config.json");
    std::fs::write(directory.path().join("generation_config.json"), "3").unwrap();
    let error = read().unwrap_err().to_string();
    assert!(error.contains("generation_config.json: expected a JSON object"), "{error}");
}

#[test]
fn refused_tensors() {
    let (config, tensors) = fixture("models/llama");
    let with = |change: &dyn Fn(&mut TensorIndex)| {
        let mut changed = tensors.clone();
        change(&mut changed);
        build_graph(&config, &changed).unwrap_err().to_string()
    };
    let q = "model.layers.1.self_attn.q_proj.weight";
    let norm = "model.layers.0.input_layernorm.weight";
    let messages = [
        with(&|t| drop(t.remove(q))),
        with(&|t| drop(t.remove("lm_head.weight"))),
        with(&|t| t.insert("model.layers.0.self_attn.q_proj.bias", DType::F32, vec![64])),
        with(&|t| t.insert("model.layers.2.input_layernorm.weight", DType::F32, vec![64])),
        with(&|t| t.insert(q, DType::F32, vec![64, 65])),
        with(&|t| t.insert(q, DType::F32, vec![])),
        with(&|t| t.insert(q, DType::I32, vec![64, 64])),
        with(&|t| t.insert(q, DType::F8E4M3, vec![64, 64])),
        with(&|t| t.insert(norm, DType::Q8_0, vec![64])),
        with(&|t| *t = TensorIndex::default()),
    ];
    insta::assert_snapshot!(messages.join("\n"));

    let (config, tensors) = fixture("models/deepseek_v3_fp8");
    let scale = "model.layers.0.self_attn.o_proj.weight_scale_inv";
    let mut without = tensors.clone();
    without.remove(scale);
    let mut mixed = tensors.clone();
    mixed.insert("model.layers.0.self_attn.o_proj.weight", DType::BF16, vec![160, 96]);
    mixed.remove(scale);
    let messages = [&without, &mixed].map(|tensors| build_graph(&config, tensors).unwrap_err().to_string());
    insta::assert_snapshot!(messages.join("\n"));

    // Rows of a table are read without scales.
    let shape = [config.vocab_size, config.hidden_size].map(u64::from);
    let mut table = tensors.clone();
    table.insert("model.embed_tokens.weight", DType::F8E4M3, shape.to_vec());
    table.insert("model.embed_tokens.weight_scale_inv", DType::F32, shape.map(|n| n.div_ceil(128)).to_vec());
    let message = build_graph(&config, &table).unwrap_err().to_string();
    assert!(message.contains("embed_tokens.weight") && message.contains("f8_e4m3"), "{message}");
}

#[test]
fn tensors_of_no_use_are_passed_over() {
    let (mut config, mut tensors) = fixture("models/deepseek_v3");
    let graph = build_graph(&config, &tensors).unwrap();
    tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq", DType::F32, vec![4]);
    tensors.insert("model.layers.2.eh_proj.weight", DType::F32, vec![64, 128]);
    assert!(build_graph(&config, &tensors).is_err());
    config.num_nextn_predict_layers = 1;
    assert_eq!(build_graph(&config, &tensors).unwrap(), graph);

    let (config, mut tensors) = fixture("models/llama_linear");
    let graph = build_graph(&config, &tensors).unwrap();
    tensors.insert("lm_head.weight", DType::F32, vec![320, 64]);
    assert_eq!(build_graph(&config, &tensors).unwrap(), graph);
}

#[test]
fn fused_experts_become_rows_of_one_tensor() {
    let (config, mut tensors) = fixture("models/qwen3_moe");
    let names: Vec<String> = tensors.iter().map(|(name, _)| name.to_owned()).collect();
    for name in names.iter().filter(|name| name.contains(".experts.")) {
        tensors.remove(name);
    }
    for layer in 0..2 {
        tensors.insert(format!("model.layers.{layer}.mlp.experts.gate_up_proj"), DType::BF16, vec![16, 64, 64]);
        tensors.insert(format!("model.layers.{layer}.mlp.experts.down_proj"), DType::BF16, vec![16, 64, 32]);
    }
    let graph = build_graph(&config, &tensors).unwrap();
    let source = |name: &str| {
        let weight = graph.weights.iter().find(|weight| weight.name == name).unwrap();
        (weight.shape.clone(), weight.sources[1].clone())
    };
    let (shape, gate) = source("ffn_gate_exps.weight");
    assert_eq!((shape, gate.transform), (vec![16, 32, 64], Transform::ExpertRows { first: 0 }));
    let (_, up) = source("ffn_up_exps.weight");
    assert_eq!(up.transform, Transform::ExpertRows { first: 32 });
    assert_eq!(up.tensors, ["model.layers.1.mlp.experts.gate_up_proj"]);
    let (shape, down) = source("ffn_down_exps.weight");
    assert_eq!((shape, down.transform), (vec![16, 64, 32], Transform::AsStored));

    // Stored [E, in, out], as some other families do.
    tensors.insert("model.layers.0.mlp.experts.down_proj", DType::BF16, vec![16, 32, 64]);
    let error = build_graph(&config, &tensors).unwrap_err();
    assert!(matches!(error, ModelError::WrongShape { .. }), "{error}");
}

#[test]
fn both_forms_of_the_latent_up_projection_in_one_file() {
    let (config, mut tensors) = fixture("gguf/deepseek2-v3-split.gguf");
    for layer in 0..2 {
        tensors.insert(format!("blk.{layer}.attn_kv_b.weight"), DType::Q8_0, vec![128, 32]);
    }
    let graph = build_graph(&config, &tensors).unwrap();
    let kv_b = graph.weights.iter().find(|weight| weight.name == "attn_kv_b.weight").unwrap();
    assert_eq!(kv_b.sources[0].transform, Transform::ToF32);
    assert_eq!(kv_b.sources[0].tensors, ["blk.0.attn_kv_b.weight"]);
}

/// Adds the tensor that building misses until none is missing.
fn completed(config: &ModelConfig, mut tensors: TensorIndex) -> (Graph, TensorIndex) {
    loop {
        match build_graph(config, &tensors) {
            Ok(graph) => return (graph, tensors),
            Err(ModelError::MissingTensor { name, expected }) => tensors.insert(name, DType::BF16, expected),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn sizes_of_published_models() {
    let dense = |architecture: &str, sizes: [u64; 7]| {
        let [vocab, hidden, intermediate, layers, heads, key_value, context] = sizes;
        let config = json!({
            "architectures": [architecture], "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": key_value, "max_position_embeddings": context,
        });
        let config = from_hf(&config.to_string()).unwrap();
        let (graph, _) = completed(&config, TensorIndex::default());
        ModelInfo::new(&config, &graph)
    };
    let llama = dense("LlamaForCausalLM", [128_256, 4096, 14_336, 32, 32, 8, 8192]);
    assert_eq!(llama.parameters, 8_030_261_248);
    assert_eq!(llama.cache_bytes_per_token(DType::BF16), Some(131_072));
    assert_eq!(llama.weight_bytes, 2 * 8_030_261_248 + 2 * 65 * 4096);
    assert_eq!(llama.memory_for_context(8192, DType::BF16), Some(llama.weight_bytes + (1 << 30)));
    assert_eq!(llama.quantization(), "bf16");
    let qwen = dense("Qwen2ForCausalLM", [152_064, 3584, 18_944, 28, 28, 4, 32_768]);
    assert_eq!(qwen.parameters, 7_615_616_512);
    assert_eq!(qwen.cache_bytes_per_token(DType::BF16), Some(57_344));
}

#[test]
fn sizes_of_deepseek_v3() {
    let config = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280, "hidden_size": 7168,
        "intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "max_position_embeddings": 163_840, "num_nextn_predict_layers": 1,
        "rope_scaling": { "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
            "mscale_all_dim": 1.0 },
    });
    let config = from_hf(&config.to_string()).unwrap();
    assert_eq!(config.layers.iter().filter(|layer| layer.feed_forward == FeedForward::Moe).count(), 58);
    let mut tensors = TensorIndex::default();
    for layer in 3..61 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        tensors.insert(format!("{prefix}.gate_up_proj"), DType::BF16, vec![256, 4096, 7168]);
        tensors.insert(format!("{prefix}.down_proj"), DType::BF16, vec![256, 7168, 2048]);
    }
    let (graph, _) = completed(&config, tensors);
    let info = ModelInfo::new(&config, &graph);
    // The published counts: 671B in all, 37B active.
    assert_eq!(info.parameters / 1_000_000_000, 671);
    assert_eq!(info.active_parameters / 1_000_000_000, 37);
    assert_eq!(info.cache_bytes_per_token(DType::BF16), Some(70_272));
}

#[test]
fn families_have_unique_names() {
    let mut names: Vec<_> = FAMILIES.iter().flat_map(|family| [family.name, family.hf.0]).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 2 * FAMILIES.len());
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0_u64..40).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z_]{0,12}".prop_map(Value::from),
        prop::collection::vec(any::<u8>(), 0..4).prop_map(Value::from),
        Just(json!({ "rope_type": "yarn", "factor": 1e-3, "original_max_position_embeddings": 1 })),
    ]
}

proptest! {
    /// Whatever one value of a config is, reading it and building its graph ends in a result.
    #[test]
    fn hostile_values_end_in_a_result(family in 0..6_usize, place in any::<prop::sample::Index>(), value in scalar()) {
        let names = ["llama", "qwen2_window", "qwen3", "qwen2_moe", "deepseek_v2_group", "deepseek_v3"];
        let mut config = fixture_json(names[family]);
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        config[place.get(&keys).as_str()] = value;
        if let Ok(mut config) = from_hf(&config.to_string()) {
            prop_assert_eq!(config.rope.inverse_frequencies().len() as u32, config.rope.rotary_dim / 2);
            prop_assert!(build_graph(&config, &TensorIndex::default()).is_err());
            add_generation_config(&mut config, "{}").unwrap();
        }
    }

    /// Whatever shape a tensor has, building ends in a result, and only the right one is accepted.
    #[test]
    fn hostile_shapes_are_refused(place in any::<prop::sample::Index>(), shape in prop::collection::vec(any::<u64>(), 0..5)) {
        let (config, mut tensors) = fixture("models/qwen3_moe");
        let names: Vec<String> = tensors.iter().map(|(name, _)| name.to_owned()).collect();
        let name = place.get(&names);
        prop_assume!(tensors.get(name).is_some_and(|spec| spec.shape != shape));
        tensors.insert(name.clone(), DType::BF16, shape);
        let refused = matches!(build_graph(&config, &tensors), Err(ModelError::WrongShape { .. }));
        prop_assert!(refused);
    }
}
