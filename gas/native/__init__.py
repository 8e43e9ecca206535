"""The ground floor: the native extension, and what every room needs of the system.

It is the only importer of ``gas._C``, with one file for each subject of ``csrc``. A function runs
natively if the extension was built, and else as its pure-torch twin in the same file. The results
are bitwise equal, except for sums over neighbours, whose order of summation differs. Beside them
are durable writes of files, strict JSON, memory, cores, checks of arguments and warnings. Nothing
of it is public: the names that other rooms may import are those below.
"""

from gas.native.augment import EgoGraph, ego_hop, find_kept_entries, on_host, subset
from gas.native.checks import (
    MOST_INT32,
    assert_range,
    cache_dir,
    check_flags,
    check_index,
    check_integer,
    check_names,
    check_number,
    check_path,
    check_probability,
    check_range,
    explain_missing_cuda,
    make_folder,
    renamed,
    warn,
)
from gas.native.cores import has_idle_cores, num_cores, process_rank, share_cores
from gas.native.custom_op import (
    custom_op,
    disable_compile,
    is_compiling,
    is_plain,
    is_transformed,
    learns,
    skip_frame,
)
from gas.native.device import reads_host_memory
from gas.native.dropout import (
    dropout,
    gather_decode,
    gather_decode_dropout,
    gather_dropout,
    norm_relu_dropout,
    norm_relu_dropout_backward,
    random_bits,
    relu_dropout,
    relu_dropout_backward,
)
from gas.native.engine import JobPolicy, make_engine
from gas.native.extension import (
    INTERFACE,
    C,
    computes_on,
    has_kernels,
    launch,
    on_cpu,
    openmp_runtimes,
    run,
)
from gas.native.files import (
    flush_to_disk,
    lock,
    parse_json,
    read_json,
    refuse,
    replace_file,
    sync_folder,
    write_json,
)
from gas.native.graph import (
    BLOCK,
    Relabeler,
    coo_to_csr,
    has_sorted_rows,
    is_valid_rowptr,
    symmetrize_edges,
)
from gas.native.matrix import TYPES, Matrix, find_starts, transpose
from gas.native.memory import (
    PeakMemory,
    allocate_pinned,
    bytes_in_proc,
    bytes_of,
    explain_full_disk,
    free_disk,
    free_memory,
    human,
    resident_bytes,
    resident_kinds,
    zeros,
)
from gas.native.progress import report_blocking, report_progress
from gas.native.rows import (
    accept_beta_state,
    csr_parts,
    first_sparse_rows,
    gather_rows,
    gather_sparse_rows,
    is_sparse,
    sparse_csr,
)
from gas.native.segments import padded_sizes, read_bytes, read_segments, write_bytes, write_segments
from gas.native.transfer import (
    CODECS,
    LARGE_BYTES,
    MOST_IDLE_BYTES,
    SHARED,
    BufferPool,
    Job,
    RowIndex,
    check_row_index,
    empty,
)
