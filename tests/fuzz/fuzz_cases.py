"""All kinds of cases that the fuzzer runs; each module registers its own."""

import fuzz_files
import fuzz_flags
import fuzz_processes
import fuzz_texts
import fuzz_traces

__all__ = ["fuzz_files", "fuzz_flags", "fuzz_processes", "fuzz_texts", "fuzz_traces"]
