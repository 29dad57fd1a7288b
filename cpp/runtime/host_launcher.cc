#include "host_launcher.h"

#include <memory>

#include "handler.h"
#include "host_registry.h"
#include "huge_pages.h"
#include "log.h"
#include "parallel.h"
#include "plan.h"
#include "scratch.h"

namespace jaxdnn {
namespace {

struct HostPlan {
  static ffi::TypeId id;
  Plan plan;
  std::vector<HostKernel> kernels;  // of each launch
};

ffi::TypeId HostPlan::id = {};

ffi::TypeInfo type_info = ffi::MakeTypeInfo<HostPlan>();

void check_launch(const Plan& plan, const Launch& launch) {
  auto require = [&](bool condition, const char* rule) {
    if (!condition) throw PlanError("kernel " + launch.kernel + ": " + rule);
  };
  const std::array<int64_t, 3> one{1, 1, 1};
  require(launch.grid[1] == 1 && launch.grid[2] == 1 && launch.block == one && launch.cluster == one &&
              launch.shared_memory == 0,
          "on the host only grid[0], the number of tasks, may be set");
  require(plan.tensor_maps.empty(), "there are no tensor maps on the host");
}

ffi::ErrorOr<std::unique_ptr<HostPlan>> instantiate(ffi::Dictionary attributes) {
  std::string op = "a plan";
  try {
    auto state = std::make_unique<HostPlan>();
    state->plan = decode_plan(attributes);
    const Plan& plan = state->plan;
    op = plan.op;
    for (const Launch& launch : plan.launches) {
      check_launch(plan, launch);
      state->kernels.push_back(host_kernel(launch.kernel, plan.arch));
    }
    ++counters.instantiates;
    if (log_enabled(LogLevel::debug)) log_line(LogLevel::debug, "instantiate: " + op + " on the host");
    return state;
  } catch (...) {
    return ffi::Unexpected(current_error(op));
  }
}

const void* address(const Plan& plan, const Argument& argument, const CallBuffers& buffers, const Scratch& scratch) {
  switch (argument.kind) {
    case Argument::Kind::buffer:
      return buffers.address(argument.buffer);
    case Argument::Kind::constant:
      return plan.constants[argument.index].data();
    case Argument::Kind::scratch:
      return scratch.data() + argument.offset;
    default:
      return &argument.bits;
  }
}

ffi::Error execute(ffi::ThreadPool pool, HostPlan* state, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  try {
    CallBuffers buffers(operands, results);
    buffers.check(state->plan);
    for (size_t i = 0; i < results.size(); ++i) {
      const ffi::AnyBuffer result = *results.get<ffi::AnyBuffer>(i).value();
      advise_huge_pages(result.untyped_data(), result.size_bytes());
    }
    const Scratch scratch(static_cast<size_t>(state->plan.scratch));
    for (size_t i = 0; i < state->kernels.size(); ++i) {
      const Launch& launch = state->plan.launches[i];
      const void* arguments[kMaxArguments];
      for (size_t j = 0; j < launch.arguments.size(); ++j) {
        arguments[j] = address(state->plan, launch.arguments[j], buffers, scratch);
      }
      run_tasks(pool, state->kernels[i], arguments, launch.grid[0]);
    }
  } catch (...) {
    return current_error(state->plan.op);
  }
  if (log_enabled(LogLevel::debug)) log_line(LogLevel::debug, "execute: " + state->plan.op + " on the host");
  counters.executes.fetch_add(1, std::memory_order_relaxed);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER(
    execute_handler, execute,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Ctx<ffi::State<HostPlan>>().RemainingArgs().RemainingRets());

}  // namespace

XLA_FFI_TypeId* const host_state_type_id = &HostPlan::id;
XLA_FFI_TypeInfo* const host_state_type_info = &type_info;

XLA_FFI_Error* host_instantiate(XLA_FFI_CallFrame* frame) { return instantiate_handler(frame); }
XLA_FFI_Error* host_execute(XLA_FFI_CallFrame* frame) { return execute_handler(frame); }

}  // namespace jaxdnn
