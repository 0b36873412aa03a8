//! Graphs of one device of a group.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use qwen_ir::passes::{CompileOptions, PassName, PermissiveDevice, Shard, compile, shard};
use qwen_ir::{Graph, Op, Phase, StateLayout, parse, test_support, text, verify};

/// The small models with weights that can be cut anywhere.
fn plain() -> Vec<Graph> {
    let plain = |graph: &Graph| parse::parse(&text::print(graph).replace("q4_0", "bf16")).unwrap();
    let mut graphs: Vec<Graph> = test_support::all().unwrap().iter().map(plain).collect();
    // Blocks of 128 that share a scale are larger than these models.
    graphs.retain(|graph| graph.name != "latent");
    let unscaled = text::print(&test_support::latent().unwrap()).replace("f8_e4m3", "bf16");
    let unscaled: Vec<&str> = unscaled.lines().collect();
    graphs.push(parse::parse(&without_scales(&unscaled)).unwrap());
    graphs
}

/// The text without the scales of a product.
fn without_scales(lines: &[&str]) -> String {
    let text = lines.join("\n");
    let scale = lines.iter().find(|line| line.contains(": f32[1,1]")).unwrap();
    let value = scale.split_whitespace().next().unwrap();
    text.replace(&format!(", {value})"), ")").replace("scales=[1]", "scales=[0]")
}

fn part(graph: &Graph, rank: u32, ranks: u32) -> Result<Graph, String> {
    let mut part = graph.clone();
    shard::run(&mut part, Some(Shard { rank, ranks })).map_err(|error| error.to_string())?;
    Ok(part)
}

fn ops(graph: &Graph) -> Vec<Vec<&'static str>> {
    graph.body_ids().map(|id| graph.body_of(id).nodes.iter().map(|id| graph.node(*id).op.name()).collect()).collect()
}

#[test]
fn ranks_have_valid_graphs_with_the_same_ops() {
    for graph in plain() {
        for ranks in [2, 4] {
            let parts: Vec<Graph> = (0..ranks).map(|rank| part(&graph, rank, ranks).unwrap()).collect();
            for part in &parts {
                verify(part).unwrap();
                let text = text::print(part);
                assert_eq!(text::print(&parse::parse(&text).unwrap()), text, "{}", graph.name);
                assert_eq!(ops(part), ops(&parts[0]), "{} among {ranks}", graph.name);
            }
            let exchanges = ops(&parts[0]).concat().iter().filter(|name| **name == "all_reduce").count();
            assert_eq!(exchanges, 2, "{}: one after attention, one after the feed-forward part", graph.name);
        }
    }
}

/// The parts of every weight are all of it, each once; but key/value heads may be held by several ranks.
#[test]
fn parts_are_the_whole() {
    for graph in plain() {
        for ranks in [2, 4] {
            let parts: Vec<Graph> = (0..ranks).map(|rank| part(&graph, rank, ranks).unwrap()).collect();
            let mut cut = 0;
            for (at, decl) in parts[0].weights.iter().enumerate().filter(|(_, decl)| decl.slice.is_some()) {
                cut += 1;
                let mut held = Vec::new();
                for part in &parts {
                    let (decl, slice) = (&part.weights[at], part.weights[at].slice.unwrap());
                    held.push((slice.first, slice.first + decl.shape[slice.axis as usize], slice.of));
                }
                if decl.name.starts_with("attn_k.") || decl.name.starts_with("attn_v.") {
                    held.dedup();
                }
                let ends: Vec<u64> = held.iter().map(|(_, end, _)| *end).collect();
                let starts: Vec<u64> = held.iter().map(|(first, ..)| *first).collect();
                assert_eq!(starts[0], 0, "{}", decl.name);
                assert_eq!(starts[1..], ends[..ends.len() - 1], "{}", decl.name);
                assert_eq!(*ends.last().unwrap(), held[0].2, "{}", decl.name);
            }
            assert!(cut >= 7, "{}: {cut}", graph.name);
        }
    }
}

#[test]
fn caches_hold_the_heads_of_their_rank() {
    let heads = |ranks| match part(&plain()[0], 0, ranks).unwrap().states[0].layout {
        StateLayout::Split { num_key_value_heads, .. } => num_key_value_heads,
        StateLayout::Joined { .. } => 0,
    };
    assert_eq!([heads(2), heads(4)], [1, 1]);
    let latent = plain().pop().unwrap();
    assert_eq!(part(&latent, 1, 2).unwrap().states, latent.states);
}

#[test]
fn a_part_becomes_a_program() {
    let mut options = CompileOptions::new(Phase::Mixed, test_support::bounds());
    options.dump_after = Some(PassName::Shard);
    for graph in plain() {
        let alone = compile(&graph, &options, &PermissiveDevice).unwrap();
        assert_eq!(alone.dump.unwrap(), text::print(&graph));
        for rank in 0..2 {
            options.shard = Some(Shard { rank, ranks: 2 });
            let compiled = compile(&graph, &options, &PermissiveDevice).unwrap();
            assert_eq!(compiled.program.result_width * 2, alone.program.result_width, "the head is cut");
            assert_eq!(compiled.dump.unwrap(), text::print(&part(&graph, rank, 2).unwrap()));
            assert!(compiled.program.instructions.iter().any(|i| matches!(i.op, Op::AllReduce { ranks: 2 })));
            assert_eq!(compiled.reports[0].pass, PassName::Shard);
        }
        options.shard = None;
    }
}

#[test]
fn what_cannot_be_split_is_refused_with_the_arithmetic() {
    let [dense, experts, latent] = <[Graph; 3]>::try_from(test_support::all().unwrap()).unwrap();
    let refused = |graph: &Graph, ranks| part(graph, 0, ranks).unwrap_err();
    for (graph, ranks, expected) in [
        (&dense, 2, "ffn_down.weight: 96 inputs among 2 devices are 48 each, and q4_0 is stored in blocks of 32"),
        (&experts, 2, "ffn_down_exps.weight: 96 inputs among 2 devices are 48 each"),
        (&latent, 2, "are not whole blocks of 128 that share a scale"),
        (&dense, 3, "4 query heads can't be split evenly among 3 devices"),
        (&dense, 8, "4 query heads can't be split evenly among 8 devices"),
    ] {
        let found = refused(graph, ranks);
        assert!(found.contains(expected), "{found}");
    }
    let twice = part(&part(&plain()[0], 0, 2).unwrap(), 0, 2).unwrap_err();
    assert!(twice.contains("one device's part already"), "{twice}");
}

/// A bias of a layer that is cut by its inputs is added once.
#[test]
fn a_bias_is_added_by_the_first_rank() {
    let graph = &plain()[0];
    let biases = |rank| {
        let part = part(graph, rank, 2).unwrap();
        let count = |node: &qwen_ir::Node| match &node.op {
            Op::Gemm { biases, .. } => biases.iter().filter(|bias| **bias).count(),
            _ => 0,
        };
        part.nodes.iter().map(count).sum::<usize>()
    };
    // Here are only biases of queries and values, which go with the outputs.
    assert_eq!([biases(0), biases(1)], [2, 2]);
}

/// Rows that can't be divided stay on every rank: who reads them takes the first rank's.
#[test]
fn a_head_that_cannot_be_divided_stays_whole() {
    let odd = text::print(&plain()[0]).replace("128,64]", "127,64]").replace("R,128]", "R,127]");
    let mut part = parse::parse(&odd).unwrap();
    let report = shard::run(&mut part, Some(Shard { rank: 1, ranks: 2 })).unwrap();
    assert!(report.notes.iter().any(|note| note.contains("127 rows are no multiple of 2")), "{report}");
    assert_eq!(part.value(part.body.results[0]).ty.columns(), Some(127));
}
