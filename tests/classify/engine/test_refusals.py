"""Refusals of configurations, before any building: one line an error."""

import pytest
from support import DIGITS

import train
from classify.engine.trial_config import TrialConfig
from deepspeed_trial import machine

INLINE = "max_length: {epochs: 1}, train_batch_size: 32, optimizer: {type: Adam, params: {lr: 0.001}}}"
D = "hyperparameters.overwrite_deepspeed_args"


Z = f"{D}.zero_optimization"


# --set arguments (D and Z stand for the DeepSpeed overrides), processes, and parts of the line
BAD = {
    "unknown key": (["D.train_batchsize=8"], 1, ["train_batchsize", "8", "'train_batch_size'"]),
    "dotted key": (['D={"zero_optimization.stage": 2}'], 1, ["zero_optimization.stage", '{"zero_optimization": {"stage": 2}}']),
    "unknown nested key": (["Z.stag=2"], 1, ["zero_optimization.stag", "2", "'stage'"]),
    "unknown key two levels down": (["Z.stage=2", "Z.offload_optimizer={device: cpu, pin: 1}"], 1, ["offload_optimizer.pin", "1"]),
    "unknown key of fp16": (["D.fp16.enable=true"], 1, ["fp16.enable", "'enabled'"]),
    "unknown key of a plain section": (["D.activation_checkpointing.profil=true"], 1, ["activation_checkpointing.profil", "'profile'"]),
    "unknown hyperparameter": (["hyperparameters.netw=1"], 1, ["hyperparameters.netw", "'hyperparameters.net'"]),
    "unknown network": (["hyperparameters.net=resnet81"], 1, ["hyperparameters.net: 'resnet81'", "did you mean 'resnet"]),
    "a hyperparameter at the top": (["mixup=0.1"], 1, ["mixup: ", "unknown key; did you mean 'hyperparameters.mixup'?"]),
    "unknown inline": (["hyperparameters={label_smothing: 0.1, MORE"], 1, ["hyperparameters.label_smothing: 0.1: unknown key", "'hyperparameters.label_smoothing'"]),
    "unknown inline of ours": (["hyperparameters={net_arg: {}, MORE"], 1, ["hyperparameters.net_arg: {}: unknown key", "'hyperparameters.net_args'"]),
    "unknown inline of DeepSpeed's": (["hyperparameters={gradient_cliping: 1, MORE"], 1, ["hyperparameters.gradient_cliping: 1: unknown key", "'hyperparameters.gradient_clipping'"]),
    "like DeepSpeed's next to a file": (["hyperparameters.gradient_cliping=1"], 1, ["hyperparameters.gradient_cliping: 1", "'hyperparameters.overwrite_deepspeed_args.gradient_clipping'"]),
    "ours among DeepSpeed's": (["D.label_smothing=0.1"], 1, ["label_smothing: 0.1", "'hyperparameters.label_smoothing'"]),
    "inline next to a file": (["hyperparameters.gradient_clipping=1"], 1, ["hyperparameters.gradient_clipping", "overwrite_deepspeed_args"]),
    "overrides of nothing": (["hyperparameters.deepspeed_config=null"], 1, ["overwrite_deepspeed_args", "ds_config.json"]),
    "no such file": (["hyperparameters.deepspeed_config=no.json"], 1, ["deepspeed_config", "'no.json'"]),
    "file is a number": (["hyperparameters.deepspeed_config=3"], 1, ["deepspeed_config", "3"]),
    "file is not JSON": (["hyperparameters.deepspeed_config=README.md"], 1, ["deepspeed_config", "README.md", "JSON"]),
    "stage 4": (["Z.stage=4"], 1, ["zero_optimization.stage: 4: input should be 0, 1, 2 or 3; change it"]),
    "stage is a word": (["Z.stage=two"], 1, ["zero_optimization.stage", "'two'"]),
    "ZeRO is a number": (["D.zero_optimization=2"], 1, ["zero_optimization", "2"]),
    "batch of 0": (["D.train_batch_size=0"], 1, ["train_batch_size", "0", "at least 1"]),
    "batch is a fraction": (["D.train_batch_size=1.5"], 1, ["train_batch_size", "1.5"]),
    "batch is a word": (["D.train_batch_size=big"], 1, ["train_batch_size", "'big'"]),
    "batch does not divide": (["D.train_batch_size=15"], 2, ["train_batch_size", "15", "14 or 16"]),
    "batch smaller than the processes": (["D.train_batch_size=2"], 3, ["train_batch_size", "2", "use 3"]),
    "batch does not divide by accumulation": (["D.gradient_accumulation_steps=3"], 1, ["train_batch_size", "gradient_accumulation_steps 3", "30 or 33"]),
    "three that disagree": (["D.train_micro_batch_size_per_gpu=4", "D.gradient_accumulation_steps=2"], 1, ["train_batch_size", "32", "use 8"]),
    "negative accumulation": (["D.gradient_accumulation_steps=-1"], 1, ["gradient_accumulation_steps", "-1"]),
    "no batch size": (["D.train_batch_size=null"], 1, ["train_batch_size", "missing"]),
    "pipeline with ZeRO 2": (["hyperparameters.pipe_parallel_size=2", "Z.stage=2"], 2, ["zero_optimization.stage", "2", "pipeline"]),
    "fp16 pipeline without ZeRO": (["hyperparameters.pipe_parallel_size=2", "D.fp16.enabled=true", "D.gradient_accumulation_steps=2"], 2, ["zero_optimization.stage: 0", "fp16 pipeline"]),
    "pipeline over too few processes": (["hyperparameters.pipe_parallel_size=2"], 1, ["pipe_parallel_size", "2", "processes, 1"]),
    "pipeline that does not divide": (["hyperparameters.pipe_parallel_size=2"], 3, ["pipe_parallel_size", "2", "processes, 3"]),
    "pipeline longer than the net": (["hyperparameters.pipe_parallel_size=16", "D.train_batch_size=32"], 16, ["pipe_parallel_size", "16", "12"]),
    "partition without a pipeline": (["hyperparameters.partition_method=uniform"], 1, ["partition_method", "pipe_parallel_size"]),
    "unknown partition": (["hyperparameters.pipe_parallel_size=2", "hyperparameters.partition_method=best"], 2, ["partition_method", "'best'", "uniform"]),
    "parameter offload with ZeRO 2": (["Z.stage=2", "Z.offload_param={device: cpu}"], 1, ["offload_param", "stage 3"]),
    "optimizer offload with ZeRO 1": (["Z.stage=1", "Z.offload_optimizer={device: cpu}"], 1, ["offload_optimizer", "stage 2"]),
    "optimizer offload with ZeRO 0": (["Z.offload_optimizer={device: cpu}"], 1, ["offload_optimizer", "zero_optimization.stage"]),
    "old offload with ZeRO 0": (["Z.cpu_offload=true"], 1, ["offload_optimizer", "zero_optimization.stage"]),
    "offload to nowhere": (["Z.stage=3", "Z.offload_param={device: disk}"], 1, ["offload_param.device", "'disk'"]),
    "offload to no path": (["Z.stage=3", "Z.offload_param={device: nvme}"], 1, ["offload_param.nvme_path"]),
    "experts with ZeRO 3": (["hyperparameters.moe=true", "Z.stage=3"], 1, ["zero_optimization.stage", "3", "experts"]),
    "experts with a pipeline": (["hyperparameters.moe=true", "hyperparameters.pipe_parallel_size=2"], 2, ["moe", "pipeline"]),
    "experts in no groups": (["hyperparameters.moe=true", "hyperparameters.moe_param_group=false", "Z.stage=1"], 1, ["moe_param_group"]),
    "experts over too many ranks": (["hyperparameters.moe=true", "hyperparameters.ep_world_size=2"], 1, ["ep_world_size", "2"]),
    "experts that do not divide": (["hyperparameters.moe=true", "hyperparameters.num_experts=[3]", "hyperparameters.ep_world_size=2"], 2, ["num_experts", "3", "multiple of 2"]),
    "no experts": (["hyperparameters.moe=true", "hyperparameters.num_experts=[]"], 1, ["num_experts", "[]"]),
    "top 3": (["hyperparameters.moe=true", "hyperparameters.top_k=3"], 1, ["top_k", "3", "1, 2"]),
    "unknown MoE type": (["hyperparameters.moe=true", "hyperparameters.mlp_type=wide"], 1, ["mlp_type", "'wide'", "residual"]),
    "experts without moe": (["hyperparameters.num_experts=[2]"], 1, ["num_experts", "moe: true"]),
    "fp16 and bf16": (["D.fp16.enabled=true", "D.bf16.enabled=true"], 1, ["bf16.enabled", "fp16"]),
    "unknown optimizer": (["D.optimizer.type=Adm"], 1, ["optimizer.type", "'Adm'", "'Adam'"]),
    "optimizer for GPUs": (["D.optimizer={type: Lamb, params: {lr: 0.1, betas: [0.9, 0.9]}}"], 1, ["optimizer.type", "'Lamb'", "CUDA"]),
    "no optimizer": (["D.optimizer=null"], 1, ["optimizer", "missing"]),
    "negative rate": (["D.optimizer.params.lr=-1"], 1, ["optimizer.params.lr", "-1"]),
    "rate is a word": (["D.optimizer.params.lr=fast"], 1, ["optimizer.params.lr", "'fast'"]),
    "three betas": (["D.optimizer.params.betas=[0.1, 0.2, 0.3]"], 1, ["optimizer.params.betas", "two numbers"]),
    "unknown schedule": (["D.scheduler.type=Cosine"], 1, ["scheduler.type", "'Cosine'"]),
    "unknown schedule parameter": (["D.scheduler.params.warmup_steps=3"], 1, ["scheduler.params.warmup_steps", "'warmup_num_steps'"]),
    "warm-up longer than training": (["D.scheduler.type=WarmupDecayLR", "D.scheduler.params.warmup_num_steps=1000"], 1, ["warmup_num_steps", "1000", "900"]),
    "Muon with one rate": (["D.optimizer={type: Muon, params: {lr: 0.02}}"], 1, ["optimizer.params.adam_lr: missing"]),
    "Muon with a rate of another form": (["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001, muon_lr: 0.1}}"], 1, ["optimizer.params.muon_lr: 0.1", "adam_lr"]),
    "Muon by another method": (["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001, ns_method: qr}}"], 1, ["optimizer.params.ns_method: 'qr'", "gram"]),
    "Muon without a rate": (["D.optimizer={type: Muon, params: {lr: 0, adam_lr: 0.001}}"], 1, ["optimizer.params.lr: 0", "above 0"]),
    "Muon that is clipped": (["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001}}", "Z.stage=2"], 1, ["gradient_clipping: 1.0", "Muon's updates", "set gradient_clipping: 0"]),
    "Muon in bf16 at stage 1": (["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001}}", "Z.stage=1", "D.bf16.enabled=true", "D.gradient_clipping=0"], 1, ["zero_optimization.stage: 1", "bf16", "use stage 0, 2 or 3"]),
    "Muon of experts with ZeRO": (["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001}}", "Z.stage=2", "hyperparameters.moe=true", "D.gradient_clipping=0"], 1, ["zero_optimization.stage: 2", "experts"]),
    "Muon whose momentum is cycled": (["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001}}", "Z.stage=3", "D.gradient_clipping=0", "D.scheduler={type: OneCycleLR, params: {cycle_momentum: true}}"], 1, ["scheduler.params.cycle_momentum: True", "stage 3"]),
    "Muon of a bias": (["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001}}", "hyperparameters.parameter_groups=[{match: conv1, muon: true}]"], 1, ["parameter_groups[0].muon: True: conv1.bias has one dimension"]),
    "Muon without Muon": (["hyperparameters.parameter_groups=[{match: conv1, muon: false}]"], 1, ["parameter_groups[0].muon: False", "optimizer.type: Muon"]),
    "groups of Adagrad with ZeRO": (["D.optimizer={type: Adagrad, params: {lr: 0.1}}", "Z.stage=1", "hyperparameters.weight_decay_on=weights"], 1, ["optimizer.type: 'Adagrad'", "one group"]),
    "groups are a number": (["hyperparameters.parameter_groups=3"], 1, ["parameter_groups: 3", "list"]),
    "group is a number": (["hyperparameters.parameter_groups=[7]"], 1, ["parameter_groups[0]: 7", "mapping"]),
    "group of no pattern": (["hyperparameters.parameter_groups=[{lr_factor: 2}]"], 1, ["parameter_groups[0].match: missing"]),
    "group of a broken pattern": (["hyperparameters.parameter_groups=[{match: '[', lr_factor: 2}]"], 1, ["parameter_groups[0].match: '['", "regular expression"]),
    "group of nothing": (["hyperparameters.parameter_groups=[{match: bias, lr_factor: 2}, {match: bn, frozen: true}]"], 1, ["parameter_groups[1].match: 'bn'", "conv1.weight"]),
    "parameter in two groups": (["hyperparameters.parameter_groups=[{match: conv1, lr_factor: 2}, {match: bias, lr_factor: 3}]"], 1, ["parameter_groups[1].match: 'bias'", "'conv1' and 'bias' match conv1.bias"]),
    "group that changes nothing": (["hyperparameters.parameter_groups=[{match: bias}]"], 1, ["parameter_groups[0]: {'match': 'bias'}", "lr_factor"]),
    "unknown key of a group": (["hyperparameters.parameter_groups=[{match: bias, lr_facter: 2}]"], 1, ["parameter_groups[0].lr_facter: 2", "'lr_factor'"]),
    "negative factor": (["hyperparameters.parameter_groups=[{match: bias, lr_factor: -2}]"], 1, ["parameter_groups[0].lr_factor: -2"]),
    "decay of a word": (["hyperparameters.parameter_groups=[{match: bias, weight_decay: much}]"], 1, ["parameter_groups[0].weight_decay: 'much'"]),
    "rate of frozen weights": (["hyperparameters.parameter_groups=[{match: bias, lr_factor: 2, frozen: true}]"], 1, ["parameter_groups[0].lr_factor: 2", "frozen"]),
    "all is frozen": (["hyperparameters.parameter_groups=[{match: ., frozen: true}]"], 1, ["parameter_groups: every parameter of net is frozen"]),
    "decay on what there is not": (["hyperparameters.weight_decay_on=biases"], 1, ["weight_decay_on: 'biases'", "weights"]),
    "decay of an optimizer without": (["hyperparameters.weight_decay_on=weights", "D.optimizer={type: Rprop, params: {lr: 0.1}}"], 1, ["weight_decay_on: 'weights'", "Rprop has no weight decay"]),
    "schedule of torch's without a rule": (["D.scheduler={type: CyclicLR}"], 1, ["scheduler.type", "'CyclicLR'", "OneCycleLR"]),
    "length in another form": (["D.scheduler={type: OneCycleLR, params: {epochs: 3}}"], 1, ["scheduler.params.epochs", "3", "OneCycleLR takes no such parameter"]),
    "place of a schedule": (["D.scheduler={type: LinearLR, params: {last_epoch: 3}}"], 1, ["scheduler.params.last_epoch", "3"]),
    "length of no kind": (["D.scheduler={type: CosineAnnealingLR, params: {T_max: 1.5}}"], 1, ["scheduler.params.T_max", "1.5", "a share of the training"]),
    "share of nothing": (["D.scheduler.params.warmup_num_steps=0.0"], 1, ["scheduler.params.warmup_num_steps", "0.0", "a share of the training"]),
    "share above all": (["D.scheduler={type: OneCycleLR, params: {pct_start: 1.5}}"], 1, ["scheduler.params.pct_start", "1.5"]),
    "rise of one step": (["D.scheduler={type: OneCycleLR, params: {total_steps: 10, pct_start: 0.1}}"], 1, ["scheduler.params.pct_start: 0.1", "1 of 10 steps", "use 0.2"]),
    "division by nothing": (["D.scheduler={type: OneCycleLR, params: {div_factor: 0}}"], 1, ["scheduler.params.div_factor", "0"]),
    "annealing by a word": (["D.scheduler={type: OneCycleLR, params: {anneal_strategy: exp}}"], 1, ["scheduler.params.anneal_strategy", "'exp'", "linear"]),
    "factor above 1": (["D.scheduler={type: LinearLR, params: {start_factor: 2.0}}"], 1, ["scheduler.params", "2.0", "LinearLR refuses"]),
    "lowest rate above the highest": (["D.scheduler={type: OneCycle, params: {cycle_min_lr: 1}}"], 1, ["scheduler.params.cycle_min_lr", "1", "0.0002"]),
    "mapping over a value": (["D.gradient_clipping={max: 1}"], 1, ["gradient_clipping", "{'max': 1}"]),
    "clipping is a word": (["D.gradient_clipping=hard"], 1, ["gradient_clipping", "'hard'"]),
    "clipping is negative": (["D.gradient_clipping=-1"], 1, ["gradient_clipping", "-1"]),
    "switch is a word": (["D.wall_clock_breakdown=often"], 1, ["wall_clock_breakdown", "'often'"]),
    "printing every 0 steps": (["D.steps_per_print=0"], 1, ["steps_per_print", "0"]),
    "removed feature": (["D.elasticity={enabled: true}"], 1, ["elasticity", "removed"]),
    "sums in another type": (["D.data_types={grad_accum_dtype: bf16}"], 1, ["data_types.grad_accum_dtype", "'bf16'", "fp32"]),
    "sums in no type": (["Z.stage=1", "D.data_types={grad_accum_dtype: int8}"], 1, ["data_types.grad_accum_dtype", "'int8'"]),
    "section inside itself": (["D.tensorboard={enabled: x}"], 1, ["tensorboard.enabled: 'x'"]),
    "slots are a word": (["resources.slots_per_trial=x"], 1, ["resources.slots_per_trial", "'x'"]),
    "metric that nothing reports": (["searcher.metric=f1"], 1, ["searcher.metric", "'f1'", "accuracy"]),
    "best is a word": (["searcher.smaller_is_better=maybe"], 1, ["searcher.smaller_is_better", "'maybe'"]),
    "stage in quotes": (["Z.stage='2'"], 1, ["zero_optimization.stage", "'2'"]),
    "value of a wrong tag": (["D.gradient_clipping=!!int x"], 1, ["--set hyperparameters.overwrite_deepspeed_args.gradient_clipping", "!!int x"]),
    "partition by a broken pattern": (["hyperparameters.pipe_parallel_size=2", "hyperparameters.partition_method='type:['"], 2, ["partition_method", "type:["]),
    "capacity above the micro-batch": (["hyperparameters.moe=true", "hyperparameters.min_capacity=64"], 1, ["min_capacity", "64", "32"]),
    "rate beyond measure": (["D.optimizer.params.lr=1.0e+308"], 1, ["optimizer.params.lr", "1e+308"]),
    "optimizer's flag is a word": (["D.optimizer.params.amsgrad=often"], 1, ["optimizer.params.amsgrad", "'often'"]),
    "optimizer's number is a word": (["D.optimizer={type: SGD, params: {lr: 0.1, dampening: x}}"], 1, ["optimizer.params.dampening", "'x'"]),
    "optimizer's pair is a word": (["D.optimizer={type: Rprop, params: {lr: 0.1, step_sizes: x}}"], 1, ["optimizer.params.step_sizes", "2 numbers"]),
    "graph of an optimizer": (["D.optimizer.params.differentiable=true"], 1, ["optimizer.params.differentiable", "remove it"]),
    "optimizer in 16 bits without ZeRO": (["D.optimizer={type: Adagrad, params: {lr: 0.1}}", "D.bf16.enabled=true"], 1, ["zero_optimization.stage", "Adagrad", "stage 2"]),
    "decay to a word": (["D.scheduler={type: WarmupCosineLR, params: {cos_min_ratio: x}}"], 1, ["scheduler.params.cos_min_ratio", "'x'"]),
    "range from a negative rate": (["D.scheduler={type: LRRangeTest, params: {lr_range_test_min_lr: -1}}"], 1, ["lr_range_test_min_lr", "-1"]),
    "scale beyond measure": (["D.fp16={enabled: true, initial_scale_power: 200}"], 1, ["fp16.initial_scale_power", "200", "62"]),
    "profile in step x": (["D.flops_profiler={enabled: true, profile_step: x}"], 1, ["flops_profiler.profile_step", "'x'"]),
    "old ZeRO 1": (["Z.stage=1", "Z.legacy_stage1=true"], 1, ["zero_optimization.legacy_stage1", "remove"]),
    "ZenFlow without a GPU": (["Z.stage=3", "Z.zenflow={topk_ratio: 0.1}"], 1, ["zero_optimization.zenflow", "GPU"]),
    "16-bit masters without ZeRO": (["D.bf16={enabled: true, bf16_master_weights_and_grads: true}"], 1, ["deepspeed_config", "Stage 1, 2, or 3"]),
    "mixed by nothing": (["hyperparameters.mixup=1e-300"], 1, ["hyperparameters.mixup", "1e-300", "0.001"]),
    "average of all": (["hyperparameters.weight_average={decay: 1}"], 1, ["hyperparameters.weight_average.decay: 1: ", "< 1"]),
    "average of less than nothing": (["hyperparameters.weight_average={decay: -0.1}"], 1, ["weight_average.decay: -0.1: ", ">= 0"]),
    "average every 0 steps": (["hyperparameters.weight_average={every: 0}"], 1, ["weight_average.every: 0: ", "at least 1"]),
    "average by an unknown key": (["hyperparameters.weight_average={decy: 0.9}"], 1, ["weight_average.decy: 0.9: unknown key", "'decay'"]),
    "average is a number": (["hyperparameters.weight_average=0.9"], 1, ["weight_average: 0.9: ", "{decay: 0.999}"]),
    "lookahead is a word": (["hyperparameters.weight_average={lookahead: far}"], 1, ["weight_average.lookahead: 'far': ", "true or false"]),
    "rising without lookahead": (["hyperparameters.weight_average={rising: true}"], 1, ["weight_average.rising: True: ", "lookahead: true"]),
    "average of 16-bit masters": (["hyperparameters.weight_average={}", "Z.stage=2", "D.bf16={enabled: true, bf16_master_weights_and_grads: true}"], 1, ["bf16.bf16_master_weights_and_grads: True: ", "weight_average"]),
    "average of weights that another process steps": (["hyperparameters.weight_average={}", "Z.stage=3", "Z.offload_optimizer={device: cpu, super_offload: true}"], 1, ["zero_optimization.offload_optimizer.super_offload: True: ", "weight_average"]),
    "views of nothing": (["hyperparameters.test_time_augmentation={}"], 1, ["hyperparameters.test_time_augmentation: ", "mirror: true"]),
    "views of an unknown kind": (["hyperparameters.test_time_augmentation={miror: true}"], 1, ["test_time_augmentation.miror: True: ", "'mirror'"]),
    "views shifted out of the image": (["hyperparameters.test_time_augmentation={shift: 32}"], 1, ["test_time_augmentation.shift: 32: ", "at most 31"]),
    "views in a pipeline": (["hyperparameters.pipe_parallel_size=2", "hyperparameters.test_time_augmentation={mirror: true}"], 2, ["test_time_augmentation: ", "pipeline"]),
    "images of no size": (["hyperparameters.progressive_resizing={scale: 0}"], 1, ["progressive_resizing.scale: 0: ", "between 0 and 1"]),
    "smaller images until the end": (["hyperparameters.progressive_resizing={until: 1}"], 1, ["progressive_resizing.until: 1: ", "between 0 and 1"]),
    "smaller images than a net takes": (["hyperparameters.progressive_resizing={}"], 1, ["progressive_resizing: 24x24: net fails on images of this size"]),
    "metric of no views": (["searcher.metric=accuracy_tta"], 1, ["searcher.metric: 'accuracy_tta': ", "set hyperparameters.test_time_augmentation"]),
    "patience with no views": (["hyperparameters.early_stopping={metric: accuracy_tta, patience: 2}"], 1, ["early_stopping.metric: 'accuracy_tta': ", "test_time_augmentation"]),
    "length beyond measure": (["hyperparameters.max_length={epochs: 100000000000000000000}"], 1, ["max_length.epochs", "100000000000000000000"]),
    "images beyond measure": (["data.image_size=20000"], 1, ["data.image_size", "20000", "512"]),
    "metric of no class": (["searcher.metric=accuracy/ten"], 1, ["searcher.metric", "'accuracy/ten'"]),
    "patience with no class": (["hyperparameters.early_stopping={metric: accuracy/ten, patience: 2}"], 1, ["early_stopping.metric", "'accuracy/ten'"]),
    "two metrics": (["searcher.metric=accuracy", "hyperparameters.early_stopping={metric: loss, patience: 2}"], 1, ["early_stopping.metric: 'loss': searcher.metric 'accuracy' chooses"]),
    "best weights by test images": (["hyperparameters.best_weights=true"], 1, ["best_weights: True: needs held-out images; set data.validation"]),
    "best weights without a checkpoint": (["hyperparameters.best_weights=true", "data.validation=0.1", "checkpoint_storage.save_trial_best=0"], 1, ["needs the best checkpoint", "save_trial_best to at least 1"]),
    "best weights that are not saved": (["hyperparameters.best_weights=true", "data.validation=0.1", "checkpoint_policy=none"], 1, ["needs the best checkpoint", "checkpoint_policy: best"]),
    "unknown searcher": (["searcher.name=sngle"], 1, ["searcher.name", "'sngle'", "'single'"]),
    "unknown key of the searcher": (["searcher.metrik=loss"], 1, ["searcher.metrik", "'loss'", "'metric'"]),
    "unknown key of the resources": (["resources.slot_per_trial=1"], 1, ["resources.slot_per_trial", "'slots_per_trial'"]),
    "unknown key of the storage": (["checkpoint_storage.save_best=1"], 1, ["checkpoint_storage.save_best", "'save_trial_best'"]),
    "a storage of no kind": (["checkpoint_storage.type=ftp"], 1, ["checkpoint_storage.type: 'ftp': must be one of s3, gcs, shared_fs, directory, azure, or null"]),
    "a storage without its place": (["checkpoint_storage={type: s3}"], 1, ["checkpoint_storage.bucket: None: must be a text without '..', as type s3 needs it"]),
    "a storage above its bucket": (["checkpoint_storage={type: gcs, bucket: a, prefix: ../b}"], 1, ["checkpoint_storage.prefix: '***': must be a text without '..'"]),
    "half of a credential": (["checkpoint_storage={type: s3, bucket: a, access_key: planted_}"], 1, ["checkpoint_storage.access_key: is given alone; give access_key and secret_key"]),
    "a storage outside of its folder": (["checkpoint_storage={type: shared_fs, host_path: /a, storage_path: /b}"], 1, ["checkpoint_storage.storage_path: '***': must be a folder in checkpoint_storage.host_path"]),
    "unknown key of the profiling": (["profiling.enable=true"], 1, ["profiling.enable", "'enabled'"]),
    "weights that are not there": (["hyperparameters.weights=none.pt"], 1, ["hyperparameters.weights: none.pt", "No such file"]),
    "weights that are none": (["hyperparameters.weights=README.md"], 1, ["hyperparameters.weights: README.md", "not a readable state_dict"]),
    "weights of a net without": (["hyperparameters.weights=DEFAULT"], 1, ["hyperparameters.weights: 'DEFAULT'", "no pretrained weights"]),
    "blocks of a net without": (["hyperparameters.checkpoint_activations=true"], 1, ["checkpoint_activations", "no blocks"]),
    "no length": (["hyperparameters.max_length=null"], 1, ["hyperparameters.max_length", "epochs"]),
    "two lengths": (["hyperparameters.max_length={epochs: 1, batches: 2}"], 1, ["hyperparameters.max_length: {'epochs': 1, 'batches': 2}: has several units", "merge", """--config hyperparameters.max_length='{"batches": 2, "epochs": null}'"""]),
    "two periods": (["min_validation_period={epochs: 1, batches: 2}"], 1, ["min_validation_period: {'epochs': 1, 'batches': 2}: has several units", "merge"]),
    "a network without a name": (["hyperparameters.net="], 1, ["hyperparameters.net: None: no such network; give one of torchvision's names, or use timm/NAME"]),
    "a number for a network": (["hyperparameters.net=3"], 1, ["hyperparameters.net: 3: no such network; give one of torchvision's names"]),
    "unknown noise": (["hyperparameters.noisy_gate_policy=loud"], 1, ["hyperparameters.noisy_gate_policy: 'loud': must be one of RSample, Jitter, None, null"]),
    "a number for a name": (["name=3"], 1, ["name: 3: must be text; put it in quotes"]),
    "a number for a section": (["hyperparameters=3"], 1, ["hyperparameters: 3: must be a mapping, as in const.yaml"]),
    "a number for a section of DeepSpeed's": (["D.activation_checkpointing=3"], 1, ["activation_checkpointing: 3: must be a mapping of DeepSpeed's keys"]),
    "a number for a described section": (["D.tensorboard=3"], 1, ["tensorboard: 3: must be a mapping; change it"]),
    "a number for precision": (["D.bf16=3"], 1, ["bf16: 3: must be a mapping, e.g. {enabled: true}"]),
    "a word for a switch": (["D.fp16.enabled=maybe"], 1, ["fp16.enabled: 'maybe': must be true or false; change it"]),
    "a word for a size": (["Z={stage: 2, reduce_bucket_size: x}"], 1, ["zero_optimization.reduce_bucket_size: 'x': must be a whole number; change it"]),
    "a loss scale below 0": (["D.fp16={enabled: true, loss_scale: -1}"], 1, ["fp16.loss_scale: -1: must be >= 0"]),
    "another program's average": (["hyperparameters.ema=0.9"], 1, ["hyperparameters.ema: 0.9: unknown key; did you mean 'hyperparameters.weight_average'?"]),
    "another program's rate": (["hyperparameters.learning_rate=0.1"], 1, ["hyperparameters.learning_rate: 0.1", "did you mean 'hyperparameters.overwrite_deepspeed_args.optimizer.params.lr'?"]),
    "another program's rate of the optimizer": (["D.optimizer.params.learning_rate=0.1"], 1, ["optimizer.params.learning_rate: 0.1", "did you mean 'lr'?"]),
    "words of a key in another order": (["hyperparameters.average_weights={}"], 1, ["did you mean 'hyperparameters.weight_average'?"]),
    "a word of a key": (["hyperparameters.smoothing=0.1"], 1, ["did you mean 'hyperparameters.label_smoothing'?"]),
    "a rate beyond the range": (["D.optimizer.params.lr=1000001"], 1, ["optimizer.params.lr: 1000001: must be a number from 0 to 1e6"]),
    "search of another length": (["searcher={name: adaptive_asha, metric: accuracy, time_metric: epochs, max_time: 3, max_trials: 2}"], 1, ["searcher.max_time", "3", "20"]),
    "search in another unit": (["searcher={name: adaptive_asha, metric: accuracy, time_metric: batches, max_time: 20, max_trials: 2}"], 1, ["searcher.time_metric", "'batches'", "epochs"]),
    "a range": (["D.optimizer.params.lr={type: log, minval: -3, maxval: -1, base: 10}"], 1, ["optimizer.params.lr", "range", "--set"]),
    "experts of another network": (["hyperparameters.net=resnet18", "hyperparameters.moe=true"], 1, ["hyperparameters.", "resnet18 has no experts"]),
    "stages of no sequence": (["hyperparameters.net=resnet18", "hyperparameters.pipe_parallel_size=2"], 2, ["not a sequence of layers"]),
    "blocks in a pipeline": (["hyperparameters.net=alexnet", "data.image_size=64", "hyperparameters.pipe_parallel_size=2", "hyperparameters.checkpoint_activations=true"], 2, ["does not work with a pipeline"]),
    "arguments of experts": (["hyperparameters.net=net-moe", "hyperparameters.net_args={a: 1}"], 1, ["use num_experts, mlp_type or top_k"]),
    "blocks of experts": (["hyperparameters.net=net-moe", "hyperparameters.checkpoint_activations=true"], 1, ["does not work with experts"]),
    "more processes than images": (["D.train_batch_size=3000"], 3000, ["train_batch_size", "1437"]),
}  # fmt: skip


# Unusual configurations that work
TAKEN = {
    "an optimizer with a parameter of another form": ["D.optimizer.type=Adafactor", "D.scheduler=null"],
    "a cosine that does not decay": ["D.scheduler={type: WarmupCosineLR, params: {cos_min_ratio: 1, warmup_num_steps: 5}}"],
    "Muon clipped without ZeRO": ["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001}}", "D.scheduler={type: OneCycle}"],
    "Muon at stage 3": ["D.optimizer={type: Muon, params: {lr: 0.02, adam_lr: 0.001}}", "Z.stage=3", "D.gradient_clipping=0"],
    "a triangle by shares": ["D.scheduler={type: OneCycleLR, params: {anneal_strategy: linear, pct_start: 0.23, div_factor: 5, final_div_factor: 3}}"],
    "lengths by shares": ["D.scheduler={type: OneCycle, params: {cycle_first_step_size: 0.1, cycle_second_step_size: 0.5, decay_step_size: 0.05}}"],
    "16-bit states of an optimizer": ["D.bf16={enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}", "Z.stage=2"],
    "a date for a name": ["name=2024-06-01"],
    "a length whose other unit a merge has taken away": ["hyperparameters.max_length={epochs: null, batches: 300}", "min_validation_period={epochs: null, batches: 100}"],
    "the end of a range": ["D.optimizer.params.lr=1000000", "hyperparameters.parameter_groups=[{match: conv, lr_factor: 1000000}]"],
    "the metric of a class": ["searcher.metric=accuracy/3"],
}  # fmt: skip


def check(capsys, changes, slots=1):
    """The exit code of a check with these changes, its output and its lines of errors."""
    sets = []
    for change in changes:
        change = change.replace("MORE", INLINE)
        for short, path in {"D": D, "Z": Z}.items():
            if change.startswith((f"{short}.", f"{short}=")):
                change = path + change[1:]
        sets += ["--set", change]
    code = train.main([*DIGITS, *sets, "--check", "--slots", str(slots)])
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


ZERO_0 = "zero_optimization.stage: "  # of one process


@pytest.mark.parametrize("case", TAKEN)
def test_the_unusual_is_taken(capsys, case):
    code, _, lines = check(capsys, TAKEN[case])
    assert code == 0
    said = ("train.py: images ", "train.py: memory ", "train.py: parameters ", f"train.py: note: {ZERO_0}")
    assert all(line.startswith(said) for line in lines), lines


@pytest.mark.parametrize("case", BAD)
def test_one_line_names_the_key_the_value_and_the_remedy(capsys, case):
    changes, slots, parts = BAD[case]
    code, out, lines = check(capsys, changes, slots)
    assert (code, out, len(lines)) == (2, "", 1), out + "\n".join(lines)
    assert [part for part in parts if part not in lines[0]] == []


# Changes, by the keys of all the errors
ALL_AT_ONCE = {
    "every section": {
        "name": "name=3",
        "searcher.metric": "searcher.metric=f1",
        "hyperparameters.max_length.epochs": "hyperparameters.max_length={epochs: 0}",
        "data.rot": "data.rot=x",
        "hyperparameters.label_smoothing": "hyperparameters.label_smoothing=7",
        "hyperparameters.net": "hyperparameters.net=resnet19",
        "hyperparameters.netw": "hyperparameters.netw=1",
        "stage": f"{D}.stage=1",
        "gradient_clipping": f"{D}.gradient_clipping=x",
        "train_batch_size": f"{D}.train_batch_size=0",
        "zero_optimization.stage": f"{Z}.stage=4",
        "optimizer.params.learning_rate": f"{D}.optimizer.params.learning_rate=1",
        "hyperparameters.overwrite_deepspeed_args.scheduler.params.warmup_num_steps": f"{D}.scheduler.params.warmup_num_steps={{type: int, minval: 1, maxval: 2}}",
        "steps_per_print": f"{D}.steps_per_print={{often: true}}",
    },
    "the trial's": {
        "data.root": "data={dataset: imagefolder, root: none}",
        "hyperparameters.mixup": "hyperparameters.mixup=-1",
        "zero_optimization.stage": f"{Z}.stage=4",
        "optimizer.params.learning_rate": f"{D}.optimizer.params.learning_rate=1",
    },
    "what does not exist": {
        "data.root": "data={dataset: imagefolder, root: none}",
        "hyperparameters.weights": "hyperparameters.weights=none.pt",
        "hyperparameters.deepspeed_config": "hyperparameters.deepspeed_config=none.json",
    },
    "what does not go together": {
        "hyperparameters.num_experts": "hyperparameters.num_experts=[2]",
        "hyperparameters.partition_method": "hyperparameters.partition_method=uniform",
        "searcher.metric": "searcher.metric=accuracy/ten",
    },
    "parameter groups, by themselves": {
        "hyperparameters.parameter_groups[0].match": "hyperparameters.parameter_groups=[{match: '['}, {match: a, frozen: 3}]",
        "hyperparameters.parameter_groups[1].frozen": "hyperparameters.label_smoothing=7",
        "hyperparameters.label_smoothing": "data.rot=x",
        "data.rot": "hyperparameters.weight_decay_on=weights",
    },
    "parameter groups and the network": {
        "hyperparameters.parameter_groups[0].match": "hyperparameters.parameter_groups=[{match: a0, frozen: true}, {match: conv, lr_factor: 2}, {match: conv1, lr_factor: 2}]",
        "hyperparameters.parameter_groups[2].match": "hyperparameters.weight_decay_on=weights",
    },
    "DeepSpeed's that does not go together": {
        "zero_optimization.stage": f"{Z}.offload_param={{device: cpu}}",
        "train_batch_size": f"{D}.gradient_accumulation_steps=3",
        "searcher.metric": "searcher.metric=accuracy/ten",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ALL_AT_ONCE)
def test_all_errors_are_said_at_once(capsys, case):
    code, _, lines = check(capsys, ALL_AT_ONCE[case].values())
    assert code == 2
    assert sorted(line.split(": ")[1] for line in lines) == sorted(ALL_AT_ONCE[case])


@pytest.mark.parametrize("what", ["offload_optimizer", "offload_param"])
def test_an_average_of_weights_takes_no_disk(capsys, what):
    """A second line may miss a library for the disk."""
    disk = f"Z.{what}={{device: nvme, nvme_path: /tmp}}"
    _, _, lines = check(capsys, ["hyperparameters.weight_average={}", "Z.stage=3", disk])
    (line,) = [each for each in lines if "weight_average" in each]
    assert line.startswith(f"train.py: zero_optimization.{what}.device: 'nvme': ")


def test_a_note_names_a_processor_without_bf16_where_autocast_asks_for_it(monkeypatch):
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "max_length": {"batches": 1}}
    hyper = {"train_batch_size": 32, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **autocast}
    config = TrialConfig.resolve(hyper, {"data": {"dataset": "digits"}}, 1, "cpu")
    for flags, notes in {"fpu avx2": 1, "fpu avx512f avx512_bf16": 0, "": 0}.items():
        monkeypatch.setattr(machine, "_cpuinfo", lambda key, flags=flags: flags)
        assert len(config.notes) == notes
        assert all("torch_autocast.enabled: True: this processor" in note for note in config.notes)


@pytest.mark.parametrize(
    "processes, net, zero, said",
    [
        (1, "net", {"stage": 2}, True),
        (1, "net", {"stage": 3}, True),
        (1, "net", {"stage": 0}, False),
        (2, "net", {"stage": 2}, False),
        (1, "resnet18", {"stage": 2}, False),
        (1, "net", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, False),
    ],
)
def test_a_note_says_what_zero_0_gives_a_small_network_in_one_process(processes, net, zero, said):
    hyper = {"train_batch_size": 32, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "net": net}
    hyper |= {"max_length": {"batches": 1}, "zero_optimization": zero}
    config = TrialConfig.resolve(hyper, {"data": {"dataset": "digits"}}, processes, "cpu")
    wanted = f"zero_optimization.stage: {zero['stage']}: one process has nothing to partition"
    assert any(note.startswith(wanted) for note in config.notes) == said
