//! Ops of expert layers: route, dispatch, combine.

use qwen_formats::DType;
use qwen_hal_abi::ops;

use super::Facts;
use super::desc::{Desc, In, Mat, Out, Vector};
use super::launch::Launch;
use crate::api::Failure;
use crate::kernels::dispatch;
use crate::kernels::route::{self, GroupScore, MAX_EXPERTS, RouteArgs, Score};

#[derive(Debug, Clone)]
pub(crate) struct Route {
    logits: Mat,
    bias: Option<Vector>,
    args: RouteArgs,
    ids: Mat,
    weights: Mat,
}

impl Route {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(2, 2)?;
        let logits = desc.f32(In(0))?;
        let experts = logits.fixed_cols();
        let args = RouteArgs {
            score: match desc.int(ops::QHAL_ATTR_SCORE, "SCORE")? {
                ops::QHAL_SCORE_SOFTMAX => Score::Softmax,
                ops::QHAL_SCORE_SIGMOID => Score::Sigmoid,
                other => return Err(desc.refuse(format!("SCORE {other}"))),
            },
            top_k: desc.size(ops::QHAL_ATTR_TOP_K, "TOP_K", MAX_EXPERTS)?,
            num_groups: usize::try_from(desc.int_or(ops::QHAL_ATTR_NUM_GROUPS, "NUM_GROUPS", 1)?).unwrap_or(0),
            topk_group: usize::try_from(desc.int_or(ops::QHAL_ATTR_TOPK_GROUP, "TOPK_GROUP", 1)?).unwrap_or(0),
            group_score: match desc.int_or(ops::QHAL_ATTR_GROUP_SCORE, "GROUP_SCORE", ops::QHAL_GROUP_SCORE_MAX)? {
                ops::QHAL_GROUP_SCORE_MAX => GroupScore::Max,
                ops::QHAL_GROUP_SCORE_TOP2_SUM => GroupScore::Top2Sum,
                other => return Err(desc.refuse(format!("GROUP_SCORE {other}"))),
            },
            renormalise: desc.flag(ops::QHAL_ATTR_RENORMALISE, "RENORMALISE", false)?,
            scale: desc.real_or(ops::QHAL_ATTR_SCALE, "SCALE", Some(1.0))?,
        };
        let groups = args.num_groups;
        let grouped = groups > 0 && experts.is_multiple_of(groups) && (1..=groups).contains(&args.topk_group);
        if experts > MAX_EXPERTS || !grouped || args.top_k > experts / groups * args.topk_group {
            let (k, chosen) = (args.top_k, args.topk_group);
            return Err(desc
                .refuse(format!("{k} of {experts} experts from {chosen} of {groups} groups, at most {MAX_EXPERTS}")));
        }
        let bias = if desc.is_absent(In(1))? { None } else { Some(desc.vector(In(1), DType::F32)?) };
        if let Some(bias) = bias {
            desc.same("bias and experts", bias.len, logits.cols)?;
        }
        let (ids, weights) = (desc.mat_fixed(Out(0), &[DType::I32])?, desc.f32(Out(1))?);
        for out in [&ids, &weights] {
            desc.same("rows", out.rows, logits.rows)?;
            desc.expect("experts a token", out.fixed_cols(), args.top_k)?;
        }
        Ok(Self { logits, bias, args, ids, weights })
    }
    pub(super) fn facts(&self) -> Facts {
        let work = self.logits.rows.expected as f64 * self.logits.cols.expected as f64 * self.args.top_k as f64;
        let written = self.ids.expected_bytes() + self.weights.expected_bytes();
        Facts::new("route").traffic(work, self.logits.expected_bytes(), written)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let bias = self.bias.as_ref().map(|bias| launch.vector(bias)).transpose()?;
        let (ids, weights) = (launch.mat_mut(&self.ids)?, launch.mat_mut(&self.weights)?);
        Ok(route::route(launch.isa, launch.parallel, &self.args, launch.mat(&self.logits)?, bias, ids, weights)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Dispatch {
    ids: Vector,
    top_k: usize,
    offsets: Vector,
    rows: Vector,
    slots: Vector,
}

impl Dispatch {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(1, 3)?;
        let top_k = desc.mat_fixed(In(0), &[DType::I32])?.fixed_cols();
        let op = Self {
            ids: desc.vector(In(0), DType::I32)?,
            top_k,
            offsets: desc.vector(Out(0), DType::I32)?,
            rows: desc.vector(Out(1), DType::I32)?,
            slots: desc.vector(Out(2), DType::I32)?,
        };
        desc.same("ids and rows", op.ids.len, op.rows.len)?;
        desc.same("ids and slots", op.ids.len, op.slots.len)?;
        let experts = desc.size(ops::QHAL_ATTR_NUM_EXPERTS, "NUM_EXPERTS", MAX_EXPERTS)?;
        if op.ids.len.max > i32::MAX as usize || op.offsets.len.as_fixed() != Some(experts + 1) {
            return Err(desc.refuse(format!("{} offsets for {experts} experts, expected one more", op.offsets.len.max)));
        }
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        let bytes = self.ids.len.expected as f64 * 4.0;
        Facts::new("dispatch").traffic(0.0, bytes, 2.0 * bytes)
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let (offsets, rows) = (launch.vector_mut(&self.offsets)?, launch.vector_mut(&self.rows)?);
        let (ids, slots) = (launch.vector(&self.ids)?, launch.vector_mut(&self.slots)?);
        Ok(dispatch::dispatch_experts(ids, self.top_k, offsets, rows, slots)?)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Combine {
    x: Mat,
    slots: Mat,
    weights: Mat,
    addend: Option<Mat>,
    out: Mat,
}

impl Combine {
    pub(super) fn parse(desc: &Desc<'_>) -> Result<Self, Failure> {
        desc.operands(4, 1)?;
        let op = Self {
            x: desc.f32(In(0))?,
            slots: desc.mat_fixed(In(1), &[DType::I32])?,
            weights: desc.f32(In(2))?,
            addend: if desc.is_absent(In(3))? { None } else { Some(desc.f32(In(3))?) },
            out: desc.f32(Out(0))?,
        };
        desc.same("columns", op.x.cols, op.out.cols)?;
        super::dense::same_shape(desc, &op.slots, &op.weights)?;
        desc.same("rows", op.slots.rows, op.out.rows)?;
        if let Some(addend) = &op.addend {
            super::dense::same_shape(desc, addend, &op.out)?;
        }
        Ok(op)
    }
    pub(super) fn facts(&self) -> Facts {
        let values = self.out.rows.expected as f64 * self.out.cols.expected as f64;
        let k = self.slots.cols.expected as f64;
        let addend = self.addend.as_ref().map_or(0.0, Mat::expected_bytes);
        let facts = Facts::new("combine");
        let facts = facts.traffic(values * 2.0 * k, self.out.expected_bytes() * k + addend, self.out.expected_bytes());
        if self.addend.is_some() { facts.in_place(3) } else { facts }
    }
    pub(super) fn launch(&self, launch: &Launch<'_>) -> Result<(), Failure> {
        let addend = self.addend.as_ref().map(|addend| launch.mat(addend)).transpose()?;
        let (x, slots, weights) = (launch.mat(&self.x)?, launch.mat(&self.slots)?, launch.mat(&self.weights)?);
        let out = launch.mat_mut(&self.out)?;
        Ok(dispatch::combine(launch.isa, launch.parallel, x, slots, weights, addend, out)?)
    }
}
