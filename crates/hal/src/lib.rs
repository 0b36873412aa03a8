//! Host side of the HAL: safe handles over a plugin's function table.
