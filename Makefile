define HELP
make            set up, and build the op library, blocksparse/blocksparse_ops.so
make demo       set up, build, and train a dense and a block-sparse language model
make test       set up, build, and run the tests: a sample of all combinations, in minutes
make test-all   every combination
make bench      time the block-sparse product and its peers; BENCH=... another of bench/, ARGS="..." for it
make wheel      a wheel in dist/, tried in a clean environment
make kernels    the kernels alone, as a library without TensorFlow
make lint       check the format of all sources; make format mends it
make clean      remove what was built; .venv stays

Set-up: packages go to the active virtual environment, or else to .venv, made with the newest Python from 3.10 to 3.13.
  PYTHON=python3      use this interpreter as it is, and install nothing
  TF=2.20             TensorFlow 2.18, 2.19, 2.20 or 2.21 (default: the one installed, or else 2.21)
  CUDA_ARCHS="80 90a" chips to build for; newer ones run the first one's PTX
  NVCC=path           the CUDA compiler; NVCC= builds for the CPU alone
  V=1                 show whole commands
endef

BUILD ?= build
CUDA_ARCHS ?= 80 90a
LIBRARY := blocksparse_ops.so
INFO := _build_info.json

ifeq ($(filter -j%,$(MAKEFLAGS)),)
MAKEFLAGS += -j$(shell nproc)
endif
.DEFAULT_GOAL := lib
.DELETE_ON_ERROR:
Q := $(if $(V),,@)
comma := ,
say = $(if $(V),,@echo "  $(1)";)

# ---- the Python environment -------------------------------------------------------------------------------------
# $(SETTING) is a one-line makefile that names the folder TensorFlow is installed in. Since it is included, make first
# makes it, which is the whole set-up, and then starts over knowing where everything is. It is named by what the set-up
# depends on, so a second run finds it and starts at once.

CONDA := $(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX))
ENV := $(or $(VIRTUAL_ENV),$(CONDA),.venv)
RUFF := $(firstword $(wildcard $(ENV)/bin/ruff) $(shell command -v ruff))
CLANG_FORMAT := $(firstword $(wildcard $(ENV)/bin/clang-format) $(shell command -v clang-format))
NEED_NOTHING := clean help kernels $(if $(RUFF),$(if $(CLANG_FORMAT),lint format))
FIND_TF := import importlib.util as u, os; s = u.find_spec("tensorflow"); \
  print(os.path.dirname(s.submodule_search_locations[0]) if s else "")

ifneq ($(filter-out $(NEED_NOTHING),$(or $(MAKECMDGOALS),lib)),)
ifeq ($(origin PYTHON),command line)
SITE := $(shell $(PYTHON) -c '$(FIND_TF)')
$(if $(SITE),,$(error $(PYTHON) has no TensorFlow: $(PYTHON) -m pip install 'tensorflow>=2.18,<2.22'))
else
PYTHON := $(ENV)/bin/python
SETTING := $(ENV)/.blocksparse-$(firstword $(shell echo "TF=$(TF)" | cat - pyproject.toml setup.py | cksum)).mk
include $(SETTING)
endif

# Without the folder's name where it lies in this tree, so that ccache knows the same file in another clone.
SITE := $(patsubst $(CURDIR)/%,%,$(SITE))
TF_VERSION := $(lastword $(subst -, ,$(basename $(notdir $(firstword \
  $(wildcard $(SITE)/tensorflow-*.dist-info $(SITE)/tensorflow_cpu-*.dist-info))))))
endif

# An environment that has everything is left as it is: TensorFlow may be there under another distribution's name.
MODULES := tensorflow numpy scipy networkx matplotlib tqdm pytest hypothesis

$(SETTING):
	@set -e; \
	if [ $(ENV) = .venv ] && ! $(PYTHON) -c '' 2>/dev/null; then \
	  for python in python3.13 python3.12 python3.11 python3.10 python3; do \
	    $$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue; \
	    if $$python -c 'import ensurepip' 2>/dev/null; then found=$$python; break; fi; \
	    bare=$${bare:-$$($$python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')}; \
	  done; \
	  if [ -n "$$found" ]; then echo "Making .venv with $$($$found --version)"; $$found -m venv --clear .venv; \
	  elif [ -n "$$bare" ]; then echo "$$bare cannot make virtual environments: apt-get install $$bare-venv"; exit 1; \
	  else echo "No Python from 3.10 to 3.13 is on the path: install one of them"; exit 1; fi; \
	fi; \
	lacking=$$($(PYTHON) -c 'import importlib.util as u; print(*[m for m in "$(MODULES)".split() if not u.find_spec(m)])'); \
	if [ $(ENV) = .venv ] || [ -n "$$lacking$(TF)" ]; then \
	  extras=dev; if nvidia-smi -L 2>/dev/null | grep -q GPU; then extras=dev,gpu; fi; \
	  echo "Installing what pyproject.toml names ($$extras) in $(ENV); the first time takes minutes"; \
	  $(PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m ensurepip; \
	  $(PYTHON) -m pip install --quiet --disable-pip-version-check --editable ".[$$extras]" $(if $(TF),'tensorflow==$(TF).*'); \
	fi; \
	rm -f $(ENV)/.blocksparse-*.mk; \
	site=$$($(PYTHON) -c '$(FIND_TF)'); echo "SITE := $$site" > $@

setup: # what every goal that needs it does first

# ---- the op library ---------------------------------------------------------------------------------------------

NVCC ?= $(firstword $(wildcard $(addsuffix /bin/nvcc,$(CUDA_HOME))) $(shell command -v nvcc) \
  $(wildcard /usr/local/cuda/bin/nvcc $(SITE)/nvidia/*/bin/nvcc))
NVCC := $(NVCC)
CCACHE := $(shell command -v ccache)

CXXFLAGS := -std=c++17 -O3 -fPIC -Wall -Wextra -fvisibility=hidden -DNDEBUG -Isrc $(EXTRA_CXXFLAGS)
TFFLAGS := -O2 -isystem $(SITE)/tensorflow/include -D_GLIBCXX_USE_CXX11_ABI=1 -DEIGEN_MAX_ALIGN_BYTES=64
NVCCFLAGS := -std=c++17 -O3 -Isrc -Xcompiler -fPIC,-fvisibility=hidden --threads 2 $(EXTRA_NVCCFLAGS)
GENCODE := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
  -gencode arch=compute_$(firstword $(CUDA_ARCHS)),code=compute_$(firstword $(CUDA_ARCHS))

SOURCES := $(wildcard src/ops/*.cc src/cpu/*.cc src/kernels/*.cc)
ifneq ($(NVCC),)
# What takes long comes first.
SOURCES := $(wildcard src/cuda/*.cu src/cuda/*.cc src/cuda/*/*.cu) $(SOURCES)
CXXFLAGS += -DBLOCKSPARSE_CUDA=1
# nvcc knows where its libraries lie, but for NVIDIA's pip packages, which keep them in lib. TensorFlow exports the names
# of the CUDA runtime too: ours comes before it, and its names stay inside.
LINK := $(NVCC) -shared -cudart none -cudadevrt none -Xlinker=-z,defs,--build-id=sha1,--exclude-libs,ALL
CUDA_LIBS := -L$(dir $(NVCC))../lib -lcudart_static -lrt -ldl
else
LINK := $(CXX) -shared -Wl,-z,defs,--build-id=sha1 $(EXTRA_CXXFLAGS)
endif
OBJECTS := $(SOURCES:%=$(BUILD)/%.o)
KERNEL_OBJECTS := $(filter-out $(BUILD)/src/ops/%,$(OBJECTS))
KERNELS := $(BUILD)/libblocksparse_kernels.so

# Vector instructions live in files without TensorFlow headers, one file per instruction set. Few machines need
# the base, whose loops take longest to compile.
ifeq ($(shell uname -m),x86_64)
%_base.cc.o: ISA := -O2
%_avx2.cc.o: ISA := -mavx2 -mfma -mf16c
%_avx512.cc.o: ISA := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
%_amx.cc.o: ISA := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16
endif

%.cu.o: CHIPS := $(GENCODE)
# These use nothing that only one chip has, nor let the next kernel start early: one pass to PTX serves all.
PORTABLE_PTX := compute_$(patsubst %a,%,$(firstword $(CUDA_ARCHS)))
PORTABLE := matmul_sm80_% embed ewops_index ewops_map ewops_random gate_grad norms_batch
$(PORTABLE:%=$(BUILD)/src/cuda/%.cu.o): CHIPS := $(foreach c,$(CUDA_ARCHS:%=sm_%) $(PORTABLE_PTX),\
  -gencode arch=$(PORTABLE_PTX),code=$(c:sm_%a=sm_%))
# Hopper's own instructions, for Hopper alone. A spilled register is an error in the checks of a change; another compiler
# than ours may spill, and only says so.
$(BUILD)/src/cuda/matmul_sm90_%.cu.o: CHIPS := -gencode arch=compute_90a,code=sm_90a \
  -Xptxas --warn-on-spills$(if $(CI),$(comma)--warning-as-error)

# $(call stamp,name,text) is a file that holds the text, written only when the text changed: what depends on it is made
# again when a flag, a compiler or TensorFlow does, and not otherwise.
stamp = $(shell mkdir -p $(BUILD); f=$(BUILD)/$(1); echo '$(2)' | cmp -s - $$f || echo '$(2)' > $$f; echo $$f)

# Nothing of this where nothing is built, nor before the set-up is done.
ifneq ($(SITE)$(filter kernels,$(MAKECMDGOALS)),)
CXX_VERSION := $(shell $(CXX) --version | head -1)
CUDA_VERSION := $(if $(NVCC),$(shell $(NVCC) --version | sed -n 's/.*release .*, V//p'))
CXX_STAMP := $(call stamp,cxx.flags,$(CXX) $(CXX_VERSION) $(CXXFLAGS))
CUDA_STAMP := $(call stamp,cuda.flags,$(NVCC) $(CUDA_VERSION) $(CXX_VERSION) $(NVCCFLAGS) $(GENCODE))
LINK_STAMP := $(call stamp,link.flags,$(LINK) $(CUDA_LIBS) $(OBJECTS))
OPS_STAMP := $(if $(SITE),$(call stamp,ops.flags,$(TF_VERSION) $(TFFLAGS)))
-include $(OBJECTS:.o=.d)
endif

# Copied over on every run where it differs, so that `make` mends whatever happened to the package's copy.
lib: $(BUILD)/$(LIBRARY) $(BUILD)/$(INFO)
	@for f in $(LIBRARY) $(INFO); do \
	  cmp -s $(BUILD)/$$f blocksparse/$$f || { cp $(BUILD)/$$f blocksparse/$$f.new; mv blocksparse/$$f.new blocksparse/$$f; }; \
	done
	@$(if $(NVCC),,echo "Built for the CPU alone: no nvcc (CUDA_HOME=... or NVCC=... names one)")

$(BUILD)/$(LIBRARY): $(OBJECTS) $(LINK_STAMP)
	$(call say,link $@)
	$(Q)$(LINK) -o $@ $(OBJECTS) $(CUDA_LIBS) -L$(SITE)/tensorflow -l:libtensorflow_framework.so.2 -lpthread

# The kernels alone, for callers without TensorFlow: benchmarks, sanitizers, other frameworks.
kernels: $(KERNELS)
$(KERNELS): $(KERNEL_OBJECTS) $(LINK_STAMP)
	$(call say,link $@)
	$(Q)$(LINK) -o $@ $(KERNEL_OBJECTS) $(CUDA_LIBS) -lpthread

# What blocksparse/_library.py checks before it loads the library.
$(BUILD)/$(INFO): $(BUILD)/$(LIBRARY)
	@printf '{"tensorflow": "%s", "abi": %s, "cuda_archs": "%s", "compiler": "%s", "build_id": "%s", "bytes": %s}\n' \
	  "$(TF_VERSION)" "$$(sed -n 's/^#define BLOCKSPARSE_ABI //p' src/kernels/abi.h)" "$(if $(NVCC),$(CUDA_ARCHS))" \
	  "$(CXX_VERSION)$(addprefix ; nvcc ,$(CUDA_VERSION))" \
	  "$$(readelf --notes $< | sed -n 's/.*Build ID: //p')" "$$(wc -c < $<)" > $@

$(BUILD)/src/ops/%.cc.o: src/ops/%.cc $(CXX_STAMP) $(OPS_STAMP)
	@mkdir -p $(@D)
	$(call say,c++  $<)
	$(Q)$(CCACHE) $(CXX) $(CXXFLAGS) $(TFFLAGS) -MMD -MP -c $< -o $@
$(BUILD)/%.cc.o: %.cc $(CXX_STAMP)
	@mkdir -p $(@D)
	$(call say,c++  $<)
	$(Q)$(CCACHE) $(CXX) $(CXXFLAGS) $(ISA) -MMD -MP -c $< -o $@
$(BUILD)/%.cu.o: %.cu $(CUDA_STAMP)
	@mkdir -p $(@D)
	$(call say,nvcc $<)
	$(Q)$(CCACHE) $(NVCC) $(NVCCFLAGS) $(CHIPS) -MMD -MP -c $< -o $@

# ---- what it is for ---------------------------------------------------------------------------------------------

RUN := PYTHONPATH=$(CURDIR) $(PYTHON)

demo: lib
	$(RUN) examples/lstm/demo.py

test: lib
	$(RUN) -m pytest
test-all: lib
	BLOCKSPARSE_TEST_ALL=1 $(RUN) -m pytest

# The kernels' own tests over a library that checks every access and every conversion. Leaks are not looked for: they
# would be Python's.
SANITIZE := -g -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: lib
	$(MAKE) kernels NVCC= BUILD=$(BUILD)/sanitize "EXTRA_CXXFLAGS=$(SANITIZE) -Wl,-z,nodefs"
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 BLOCKSPARSE_KERNELS=$(BUILD)/sanitize/$(notdir $(KERNELS)) $(RUN) -m pytest test/test_kernels.py

bench: lib
	$(RUN) bench/$(or $(BENCH),matmul).py $(or $(ARGS),$(if $(BENCH),,--suite floors))

# The check runs where nothing of this tree is in reach.
wheel: lib
	rm -rf dist $(BUILD)/wheel $(BUILD)/clean && mkdir -p $(BUILD)/wheel
	BLOCKSPARSE_TENSORFLOW="==$(basename $(TF_VERSION)).*" $(PYTHON) -m pip wheel -q --no-deps --wheel-dir dist .
	$(PYTHON) -m venv $(BUILD)/clean && $(BUILD)/clean/bin/pip install -q --disable-pip-version-check dist/*.whl
	cp examples/simple.py $(BUILD)/clean && cd $(BUILD)/clean && PYTHONPATH= bin/python simple.py
	rm -rf $(BUILD)/clean; ls dist/*.whl

CXX_FILES = $(shell find $(wildcard src bench test) -name '*.h' -o -name '*.cuh' -o -name '*.cc' -o -name '*.cu')
lint:
	$(RUFF) check && $(RUFF) format --check
	$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)
format:
	$(RUFF) check --fix; $(RUFF) format
	$(CLANG_FORMAT) -i $(CXX_FILES)

clean:
	rm -rf $(BUILD) dist blocksparse/$(LIBRARY) blocksparse/$(INFO)

export HELP
help:
	@echo "$$HELP"

.PHONY: lib kernels setup demo test test-all bench wheel lint format clean help
