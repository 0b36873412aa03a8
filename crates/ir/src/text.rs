//! The text form: deterministic, one node a line, read back by [`parse`](crate::parse::parse).
//!
//! ```text
//! graph "tiny" {
//!   bounds T=1..32 S=1..4 R=1..4 B=1..8 N=1..32
//!   weight @0 "attn_q.weight" persistent [64,64] first_layer=0 {
//!     q4_0 as_stored "blk.0.attn_q.weight"
//!   }
//!   state $0 "kv" dynamic f16 split(2,16,16) per_block(16) layers=0+2
//!   body () {
//!     %0 = input {name=token_ids, tolerance=exact, sensitivity=normal} () : i32[T] ; "inputs"
//!     return %9
//!   }
//!   template #0 "layer" (%3: f32[T,64]) {
//!     ...
//!   }
//! }
//! ```
//!
//! Values are numbered in the order of the text, whatever their place in the arena ([`Graph::compacted`] renumbers a graph
//! the same way). `//` starts a comment. Numbers are printed so that reading them back gives the same bits.

use std::collections::HashMap;
use std::fmt::{self, Write};

use crate::passes::plan_memory::MemoryPlan;
use crate::program::{Operand, Place, Program};
use crate::{
    Body, BodyId, Epilogue, Graph, GrowthPattern, Node, NodeId, Op, StateLayout, Sums, Symbol, TensorType, Transform,
    ValueId, WeightDecl,
};

/// Text of a graph.
#[must_use]
pub fn print(graph: &Graph) -> String {
    Printer::new(graph, None).print()
}

/// Text of a flat graph, with the place of each temporary as a comment.
#[must_use]
pub fn print_with_places(graph: &Graph, plan: &MemoryPlan) -> String {
    Printer::new(graph, Some(plan)).print()
}

/// Line by line difference of the texts of two graphs, in unified form; empty if they are equal.
#[must_use]
pub fn diff(a: &Graph, b: &Graph) -> String {
    let (a, b) = (print(a), print(b));
    similar::TextDiff::from_lines(&a, &b).unified_diff().context_radius(2).to_string()
}

impl Graph {
    /// The same graph with values and nodes numbered in the order of the text, and without those that no body lists.
    #[must_use]
    pub fn compacted(&self) -> Self {
        let numbers = Numbers::new(self);
        let renumber = |v: &ValueId| numbers.of.get(v).copied().unwrap_or(*v);
        let mut compact = self.clone();
        compact.values.clear();
        compact.nodes.clear();
        let mut node_numbers = HashMap::new();
        for (i, id) in numbers.nodes.iter().enumerate() {
            node_numbers.insert(*id, NodeId(i as u32));
            let mut node = self.node(*id).clone();
            node.inputs.iter_mut().for_each(|v| *v = renumber(v));
            node.outputs.iter_mut().for_each(|v| *v = renumber(v));
            compact.nodes.push(node);
        }
        for id in &numbers.values {
            let mut value = self.value(*id).clone();
            value.def = value.def.and_then(|id| node_numbers.get(&id).copied());
            compact.values.push(value);
        }
        for id in self.body_ids() {
            let body = compact.body_of_mut(id);
            body.nodes.iter_mut().for_each(|n| *n = node_numbers.get(n).copied().unwrap_or(*n));
            body.params.iter_mut().chain(&mut body.results).for_each(|v| *v = renumber(v));
        }
        compact
    }
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print(self))
    }
}

/// Values and nodes in the order of the text.
struct Numbers {
    of: HashMap<ValueId, ValueId>,
    values: Vec<ValueId>,
    nodes: Vec<NodeId>,
}

impl Numbers {
    fn new(graph: &Graph) -> Self {
        let mut numbers = Self { of: HashMap::new(), values: Vec::new(), nodes: Vec::new() };
        for body in graph.body_ids().map(|id| graph.body_of(id)) {
            body.params.iter().for_each(|v| numbers.value(*v));
            for id in &body.nodes {
                numbers.nodes.push(*id);
                graph.node(*id).outputs.iter().for_each(|v| numbers.value(*v));
            }
        }
        numbers
    }
    fn value(&mut self, value: ValueId) {
        let next = ValueId(self.values.len() as u32);
        if self.of.insert(value, next).is_none() {
            self.values.push(value);
        }
    }
}

struct Printer<'g> {
    graph: &'g Graph,
    plan: Option<&'g MemoryPlan>,
    numbers: Numbers,
    out: String,
}

/// Appends to the text; writing to a string can't fail.
macro_rules! put {
    ($printer:expr, $($argument:tt)*) => {
        write!($printer.out, $($argument)*).unwrap_or_default()
    };
}

impl<'g> Printer<'g> {
    fn new(graph: &'g Graph, plan: Option<&'g MemoryPlan>) -> Self {
        Self { graph, plan, numbers: Numbers::new(graph), out: String::new() }
    }

    fn print(mut self) -> String {
        let graph = self.graph;
        put!(self, "graph {:?} {{\n  bounds", graph.name);
        for symbol in Symbol::ALL {
            let bounds = graph.bounds.get(symbol);
            put!(self, " {}={}..{}", symbol.name(), bounds.min, bounds.max);
        }
        self.out.push('\n');
        for (i, decl) in graph.weights.iter().enumerate() {
            self.weight(i, decl);
        }
        for (i, state) in graph.states.iter().enumerate() {
            put!(self, "  state ${i} {:?} dynamic {} ", state.name, state.dtype.name());
            match state.layout {
                StateLayout::Split { num_key_value_heads, head_dim, value_dim } => {
                    put!(self, "split({num_key_value_heads},{head_dim},{value_dim})");
                }
                StateLayout::Joined { latent_dim, rope_dim } => put!(self, "joined({latent_dim},{rope_dim})"),
            }
            match state.growth {
                GrowthPattern::Fixed => put!(self, " fixed"),
                GrowthPattern::PerBlock { tokens } => put!(self, " per_block({tokens})"),
            }
            put!(self, " layers={}+{}\n", state.first_layer, state.layers);
        }
        for id in graph.body_ids() {
            match id {
                BodyId::Main => put!(self, "  body "),
                BodyId::Template(t) => put!(self, "  template #{} {:?} ", t.0, graph.template(t).name),
            }
            self.body(graph.body_of(id));
        }
        self.out.push_str("}\n");
        self.out
    }

    fn weight(&mut self, index: usize, decl: &WeightDecl) {
        put!(self, "  weight @{index} {:?} persistent [", decl.name);
        for (i, n) in decl.shape.iter().enumerate() {
            put!(self, "{}{n}", if i == 0 { "" } else { "," });
        }
        self.out.push(']');
        if let Some(first) = decl.first_layer {
            put!(self, " first_layer={first}");
        }
        if let Some(slice) = decl.slice {
            put!(self, " slice({},{},{})", slice.axis, slice.first, slice.of);
        }
        self.out.push_str(" {\n");
        for source in &decl.sources {
            put!(self, "    {} ", source.dtype.name());
            match &source.transform {
                Transform::AsStored => put!(self, "as_stored"),
                Transform::Stack => put!(self, "stack"),
                Transform::Rows { first } => put!(self, "rows({first})"),
                Transform::ExpertRows { first } => put!(self, "expert_rows({first})"),
                Transform::MergeKvB { num_heads, nope_dim, value_dim } => {
                    put!(self, "merge_kv_b({num_heads},{nope_dim},{value_dim})");
                }
                Transform::ToF32 => put!(self, "to_f32"),
            }
            for tensor in &source.tensors {
                put!(self, " {tensor:?}");
            }
            self.out.push('\n');
        }
        self.out.push_str("  }\n");
    }

    fn body(&mut self, body: &Body) {
        self.out.push('(');
        for (i, value) in body.params.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            put!(self, "{comma}{}: {}", self.number(*value), self.graph.value(*value).ty);
        }
        self.out.push_str(") {\n");
        for id in &body.nodes {
            self.node(self.graph.node(*id));
        }
        self.out.push_str("    return ");
        self.values(&body.results);
        self.out.push_str("\n  }\n");
    }

    fn number(&self, value: ValueId) -> String {
        // A dangling value has no number: the text says so instead of hiding it.
        self.numbers.of.get(&value).map_or_else(|| format!("%undefined_{}", value.0), |v| format!("%{}", v.0))
    }

    fn values(&mut self, values: &[ValueId]) {
        for (i, value) in values.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            put!(self, "{comma}{}", self.number(*value));
        }
    }

    fn node(&mut self, node: &Node) {
        self.out.push_str("    ");
        if !node.outputs.is_empty() {
            self.values(&node.outputs);
            self.out.push_str(" = ");
        }
        put!(self, "{} {{", node.op.name());
        self.op(&node.op);
        let attributes = &node.attributes;
        put!(self, "tolerance={}, sensitivity={}", attributes.tolerance.name(), attributes.sensitivity.name());
        if !attributes.compute.is_empty() {
            let names: Vec<&str> = attributes.compute.iter().map(|c| c.name()).collect();
            put!(self, ", compute=[{}]", names.join(","));
        }
        if attributes.sums != Sums::F32 {
            put!(self, ", sums={:?}", attributes.sums.to_string());
        }
        if let Some(phase) = attributes.phase {
            put!(self, ", phase={}", phase.name());
        }
        if let Some(tiling) = &attributes.tiling {
            put!(self, ", tiling={tiling:?}");
        }
        if let Some(layer) = attributes.layer {
            put!(self, ", layer={layer}");
        }
        self.out.push_str("} (");
        self.values(&node.inputs);
        self.out.push(')');
        for (i, value) in node.outputs.iter().enumerate() {
            let separator = if i == 0 { " : " } else { ", " };
            let ty: &TensorType = &self.graph.value(*value).ty;
            put!(self, "{separator}{ty}");
        }
        put!(self, " ; {:?}", attributes.origin);
        for value in &node.outputs {
            if let Some((pool, offset)) = self.plan.and_then(|p| p.places.get(value.index()).copied().flatten()) {
                put!(self, " // {pool:?} + {offset}");
            }
        }
        self.out.push('\n');
    }

    /// Attributes of a kind, each followed by a comma.
    fn op(&mut self, op: &Op) {
        match op {
            Op::Input { name } => put!(self, "name={name}, "),
            Op::Weight(id) => put!(self, "weight=@{}, ", id.0),
            Op::Const { data } => {
                self.out.push_str("data=[");
                for (i, x) in data.iter().enumerate() {
                    put!(self, "{}{x:?}", if i == 0 { "" } else { "," });
                }
                self.out.push_str("], ");
            }
            Op::Gemm { gemm_type, biases, scales, epilogue } => {
                put!(self, "type={}, biases={}, scales={}, ", gemm_type.name(), flags(biases), flags(scales));
                self.epilogue(*epilogue);
            }
            Op::GroupedGemm { num_experts, top_k, gather, scales, epilogue } => {
                put!(self, "num_experts={num_experts}, top_k={top_k}, gather={gather}, scales={}, ", flags(scales));
                self.epilogue(*epilogue);
            }
            Op::Norm { eps, axis } => put!(self, "eps={eps:?}, axis={axis}, "),
            Op::Rope(r) => put!(
                self,
                "num_heads={}, head_dim={}, rotary_offset={}, rotary_dim={}, style={}, attention_factor={:?}, ",
                r.num_heads,
                r.head_dim,
                r.rotary_offset,
                r.rotary_dim,
                r.style.name(),
                r.attention_factor
            ),
            Op::Glu(function) | Op::Unary(function) => put!(self, "function={}, ", function.name()),
            Op::Binary(function) => put!(self, "function={}, ", function.name()),
            Op::KvAppend { state } => put!(self, "state=${}, ", state.0),
            Op::Attention { state, attention: a } => put!(
                self,
                "state=${}, num_heads={}, num_key_value_heads={}, head_dim={}, value_dim={}, scale={:?}, window={}, ",
                state.0,
                a.num_heads,
                a.num_key_value_heads,
                a.head_dim,
                a.value_dim,
                a.scale,
                a.window
            ),
            Op::MlaAttention { state, attention: a } => put!(
                self,
                "state=${}, num_heads={}, nope_dim={}, rope_dim={}, value_dim={}, latent_dim={}, scale={:?}, form={}, ",
                state.0,
                a.num_heads,
                a.nope_dim,
                a.rope_dim,
                a.value_dim,
                a.latent_dim,
                a.scale,
                a.form.map_or("any", crate::MlaForm::name)
            ),
            Op::Route { route: r, bias } => put!(
                self,
                "score={}, num_experts={}, top_k={}, num_groups={}, topk_group={}, group_score={}, renormalise={}, scale={:?}, bias={bias}, ",
                r.score.name(),
                r.num_experts,
                r.top_k,
                r.num_groups,
                r.topk_group,
                r.group_score.name(),
                r.renormalise,
                r.scale
            ),
            Op::Dispatch { num_experts } => put!(self, "num_experts={num_experts}, "),
            Op::Combine { addend } => put!(self, "addend={addend}, "),
            Op::Columns { offset, width } => put!(self, "offset={offset}, width={width}, "),
            Op::Layers { template, first, count } => {
                put!(self, "template=#{}, first={first}, count={count}, ", template.0);
            }
            Op::AllReduce { ranks } => put!(self, "ranks={ranks}, "),
            Op::Embed | Op::GatherRows | Op::Cast | Op::Softmax => {}
        }
    }

    fn epilogue(&mut self, epilogue: Epilogue) {
        match epilogue {
            Epilogue::None => put!(self, "epilogue=none, "),
            Epilogue::Glu(function) => put!(self, "epilogue=glu_{}, ", function.name()),
            Epilogue::Add => put!(self, "epilogue=add, "),
        }
    }
}

fn flags(flags: &[bool]) -> String {
    let digits: Vec<&str> = flags.iter().map(|f| if *f { "1" } else { "0" }).collect();
    format!("[{}]", digits.join(","))
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Arena { pool, offset } => write!(f, "{pool:?}+{offset}"),
            Self::Weight { id, source } => write!(f, "weight@{}.{source}", id.0),
            Self::Constant { index } => write!(f, "table{index}"),
            Self::State { id, layer } => write!(f, "state${}.{layer}", id.0),
            Self::Input { index } => write!(f, "input{index}"),
            Self::Result => f.write_str("result"),
            Self::Absent => f.write_str("absent"),
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.place)?;
        if self.place == Place::Absent {
            return Ok(());
        }
        if self.byte_offset > 0 {
            write!(f, "+{}", self.byte_offset)?;
        }
        let ty = TensorType { dtype: self.dtype, shape: self.shape.clone() };
        write!(f, ":{ty}")?;
        if ty.columns().is_some_and(|n| n != self.row_stride) {
            write!(f, "/{}", self.row_stride)?;
        }
        Ok(())
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program {:?} inputs {:?} arena {:?}", self.name, self.inputs, self.arena_bytes)?;
        for instruction in &self.instructions {
            write!(f, "  {}", instruction.op.name())?;
            let list = |f: &mut fmt::Formatter<'_>, operands: &[Operand]| {
                operands.iter().enumerate().try_for_each(|(i, o)| write!(f, "{}{o}", if i == 0 { "" } else { ", " }))
            };
            f.write_str(" (")?;
            list(f, &instruction.inputs)?;
            f.write_str(") -> (")?;
            list(f, &instruction.outputs)?;
            f.write_str(")")?;
            let names: Vec<&str> = instruction.compute.iter().map(|c| c.name()).collect();
            if !names.is_empty() {
                write!(f, " {}", names.join(","))?;
            }
            if instruction.sums != Sums::F32 {
                write!(f, " sums {}", instruction.sums)?;
            }
            writeln!(f, " ; {}", instruction.origin)?;
        }
        Ok(())
    }
}
