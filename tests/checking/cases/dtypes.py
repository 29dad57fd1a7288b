"""Names of dtypes, and the short forms in which they stand in the ids of tests."""

BF16, F16, F32, F64 = "bfloat16", "float16", "float32", "float64"
E4M3, E5M2, I8, I32 = "float8_e4m3fn", "float8_e5m2", "int8", "int32"
SHORT = {BF16: "bf16", F16: "f16", F32: "f32", F64: "f64", E4M3: "e4m3", E5M2: "e5m2", I8: "i8", I32: "i32"}
