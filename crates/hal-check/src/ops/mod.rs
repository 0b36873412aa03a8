//! Cases of ops: descriptions, inputs and oracles as data.

mod attention;
mod dense;
mod experts;
mod gemm;

use qwen_hal::abi::ops::QHAL_DTYPE_I32;
use qwen_hal::abi::qhal_tensor_desc;
use qwen_hal::{Dim, OpDesc, TensorDesc};

use crate::case::{Body, Case};
use crate::execute::{Company, Expected, OpCase, Operand, bytes_of, bytes_of_ints};
use crate::limits::Limit;

/// Rows of a step: symbol 0, planned for 1 to 9.
const T: Dim = Dim::symbol(0, 1, MAX_ROWS);
const MAX_ROWS: i64 = 9;

fn n(size: usize) -> Dim {
    Dim::from(size)
}
fn f(dims: &[Dim]) -> TensorDesc {
    TensorDesc::f32(dims)
}
fn i(dims: &[Dim]) -> TensorDesc {
    TensorDesc::new(QHAL_DTYPE_I32, dims)
}
fn reals(values: &[f32]) -> Operand {
    Operand::Bytes(bytes_of(values))
}
fn ints(values: &[i32]) -> Operand {
    Operand::Bytes(bytes_of_ints(values))
}
fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// An op case as it is built.
struct Build {
    op: OpDesc,
    inputs: Vec<Operand>,
}

impl Build {
    const fn new(op: OpDesc) -> Self {
        Self { op, inputs: Vec::new() }
    }
    fn input(mut self, tensor: TensorDesc, operand: Operand) -> Self {
        self.op = self.op.input(tensor);
        self.inputs.push(operand);
        self
    }
    fn absent(self) -> Self {
        self.input(TensorDesc::none(), Operand::Absent)
    }
    fn output(mut self, tensor: TensorDesc) -> Self {
        self.op = self.op.output(tensor);
        self
    }
    fn int(mut self, key: u32, value: usize) -> Self {
        self.op = self.op.attr_int(key, value as i64);
        self
    }
    fn code(mut self, key: u32, value: i64) -> Self {
        self.op = self.op.attr_int(key, value);
        self
    }
    fn real(mut self, key: u32, value: f64) -> Self {
        self.op = self.op.attr_real(key, value);
        self
    }
    fn case(self, level: u32, name: impl Into<String>, symbols: &[i64], expected: Vec<Expected>, limit: Limit) -> Case {
        let body = OpCase {
            op: self.op,
            inputs: self.inputs,
            symbols: symbols.to_vec(),
            expected,
            limit,
            company: Vec::new(),
        };
        Case { name: format!("{level}/{}", name.into()), level, body: Body::Op(Box::new(body)) }
    }
}

/// Bytes from row to row, if the outermost dimension is the number of rows.
fn pitch(tensor: &qhal_tensor_desc) -> Option<usize> {
    if tensor.rank == 0 || tensor.rank > 8 || tensor.dim_symbol[0] != 1 {
        return None;
    }
    let (block_len, block_bytes) = qwen_hal::abi::ops::dtype_block(tensor.dtype)?;
    Some(usize::try_from(tensor.strides[0]).ok()? / block_len as usize * block_bytes as usize)
}

/// Adds runs of the first row, the last, and the first half alone: for ops whose row of the result depends on its row of the
/// inputs only.
fn by_rows(mut case: Case) -> Case {
    let Body::Op(op) = &mut case.body else { return case };
    let rows = op.symbols.first().and_then(|rows| usize::try_from(*rows).ok()).unwrap_or(0);
    let Some(out_pitch) = op.op.outputs().first().and_then(|tensor| pitch(tensor.raw())) else { return case };
    for part in [0..1, rows - 1..rows, 0..rows.div_ceil(2)] {
        let of = |tensor: &TensorDesc, operand: &Operand| match (operand, pitch(tensor.raw())) {
            (Operand::Bytes(bytes), Some(pitch)) => {
                let end = (part.end * pitch).min(bytes.len());
                Operand::Bytes(bytes[part.start * pitch..end].to_vec())
            }
            (operand, _) => operand.clone(),
        };
        let inputs = op.op.inputs().iter().zip(&op.inputs).map(|(tensor, operand)| of(tensor, operand)).collect();
        let mut symbols = op.symbols.clone();
        symbols[0] = part.len() as i64;
        op.company.push(Company { inputs, symbols, at: part.start * out_pitch..part.end * out_pitch });
    }
    case
}

/// Every op case up to a level, and for each kind the demand that one of its cases is supported.
pub(crate) fn cases(level: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    if level >= 1 {
        cases.extend(dense::cases());
        cases.extend(gemm::cases());
        cases.extend(attention::cases());
    }
    if level >= 2 {
        cases.extend(experts::cases());
        cases.extend(attention::latent_cases());
    }
    let mut kinds: Vec<(u32, u32, &'static str)> = Vec::new();
    for case in &cases {
        if let Body::Op(op) = &case.body
            && !kinds.iter().any(|(_, kind, _)| *kind == op.op.kind())
        {
            kinds.push((case.level, op.op.kind(), op.op.name()));
        }
    }
    let coverage = |(level, kind, name): (u32, u32, &'static str)| Case {
        name: format!("{level}/coverage/{name}"),
        level,
        body: Body::Coverage(kind),
    };
    cases.extend(kinds.into_iter().map(coverage));
    cases
}
