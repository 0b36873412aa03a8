//! Loops over registers whose number is known at compile time.

/// The body for each row of a tile. A loop of sixteen would not be unrolled, and its accumulators would live in memory.
macro_rules! unroll {
    ($t:ident < $w:ident, $body:block) => {
        unroll!(@ $t $w $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $t:ident $w:tt $body:block $($i:literal)*) => {
        $(if $i < $w {
            let $t = $i;
            $body
        })*
    };
}
pub(super) use unroll;
