# ruff: noqa: E501
"""Bad input: a table of commands, what each says, and its exit code. None ends in a traceback."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from tests.commands import matcha_command

FILES = {
    "pair.json": "[[0,[1]]]",
    "null.json": "[[0,null]]",
    "empty.json": "[]",
    "loop.json": "[[0,0]]",
    "twice.json": "[[0,1],[1,0]]",
    "apart.json": "[[0,1],[2,3]]",
    "some.json": "[[0,1,0.1],[1,2]]",
    "huge.json": "[[0,1,1e308],[1,2,1]]",
    "neg.json": "[[0,1,-1],[1,2,1]]",
    "nan.json": "[[0,1,NaN],[1,2,1]]",
    "broken.json": "[[0,1",
    "object.json": "{}",
    "string.json": '"ring"',
    "number.json": "3",
    "schema.json": '{"schema":"matcha.topology/9","links":[[0,1]]}',
    "weird.json": '{"links":[[0,1]],"num_workers":"two"}',
    "labels.json": '{"links":[[0,5]],"labels":["a","b"]}',
    "weight.graphml": (
        '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><key id="d" for="edge" '
        'attr.name="weight" attr.type="double"/><graph edgedefault="undirected"><node id="0"/>'
        '<node id="1"/><node id="2"/><edge source="0" target="1"><data key="d">1</data></edge>'
        '<edge source="1" target="2"><data key="d">5</data></edge></graph></graphml>'
    ),
    "bad.graphml": "<graphml",
    "bom.json": "\ufeff[[0,1],[2,3]]",
    "gap.csv": "",
    "true.json": "[[true,false]]",
    "deep.json": "[" * 100_000,
    "many.json": '{"links":[[0,1]],"num_workers":1000000000}',
    "fewer.json": '{"links":[[0,1]],"num_workers":-3}',
    "times.json": '{"links":[[0,1]],"link_times":5}',
    "none.json": '{"links":[[0,1]],"link_times":[null]}',
    "vast.json": f"[[0,1,1{'0' * 400}]]",
    "points.json": '{"links":[[0,1]],"positions":[[0],[1]]}',
    "oneway.json": '{"links":[[0,1]],"directed":"yes"}',
    "names.json": '{"links":[[0,1]],"labels":[{},{}]}',
    "hand.json": '{"nodes":[{"id":"a"},{"id":"b"}],"edges":[{"source":"a","target":"c"}]}',
    "several.json": (
        '{"multigraph":true,"nodes":[{"id":0},{"id":1}],'
        '"links":[{"source":0,"target":1,"key":0},{"source":0,"target":1,"key":1}]}'
    ),
    "inf.csv": "0,inf\ninf,0",
    "wide.csv": "0,1,1\n1,0,1",
    "fast.edges": "0 1 fast",
    "mixed.edges": "0 -> 1\n1 2",
    "page.graphml": "<html></html>",
    "events.json": '{"losses":[[0,10,5]]}',
    "bad.csv": "0,1\n0,0",
    "words.csv": "a,b\nc,d",
    "rag.csv": "0,1\n1",
    "bad.edges": "0 1 2 3\n",
    "some.edges": "0 1 0.1\n1 2\n",
    "empty.edges": "",
    "file.docx": "",
    "text.npy": "no",
    "plan.json": '{"schema":"matcha.plan/1"}',
    "planx.json": '{"schema":"matcha.plan/99"}',
    "plandamaged.json": '{"schema": "matcha.plan/1", "checksum": "0"}',
    "matchings.json": "[[[0,1],[1,2]]]",
    "matchings2.json": "3",
    "matchings3.json": '[["a"]]',
    "notjson.json": "hello",
    "afile": "x",
    "run/run.json": "{}",
    "run2/run.json": '{"schema":"matcha.run/2"}',
    "run3/run.json": "nope",
}

# A command, words of what it says on standard error; the exit code is 2 for all of them.
TABLE = """
plan => TOPOLOGY is missing. (`matcha plan --help` says more)
plan nowhere => unknown topology family 'nowhere': did you mean 'hypercube'?
plan ring => 'ring' is not of the form ring:WORKERS.
plan ring: => 'ring:' is not of the form ring:WORKERS.
plan ring:x => 'ring:x' is not of the form ring:WORKERS.
plan ring:1 => ring needs a size of at least 3, not 1.
plan ring:-3 => ring needs a size of at least 3, not -3.
plan ring:8:9 => 'ring:8:9' is not of the form ring:WORKERS.
plan ring:1000000000 => ring:1000000000 would have about 1e+09 links, more than the 2,00
plan hypercube:40 => hypercube:40 would have about 2.2e+13 links, more than the 2,000
plan hypercube:0 => hypercube needs a size of at least 1, not 0.
plan complete:3000 => complete:3000 would have about 4.5e+06 links, more than the 2,00
plan complete:1 => complete needs a size of at least 2, not 1.
plan torus:4 => 'torus:4' is not of the form torus:ROWSxCOLUMNS.
plan torus:1x4 => torus needs a size of at least 2, not 1.
plan torus:axb => 'torus:axb' is not of the form torus:ROWSxCOLUMNS.
plan star:1 => star needs a size of at least 2, not 1.
plan path:1 => path needs a size of at least 2, not 1.
plan barbell:3 => barbell needs a size of at least 4, not 3.
plan erdos-renyi:16 => 'erdos-renyi:16' is not of the form erdos-renyi:WORKERS:PROBABIL
plan erdos-renyi:16:2 => erdos-renyi needs a probability in (0, 1], not 2.0.
plan erdos-renyi:16:0 => erdos-renyi needs a probability in (0, 1], not 0.0.
plan erdos-renyi:16:nan => erdos-renyi needs a probability in (0, 1], not nan.
plan erdos-renyi:40:0.0001 => erdos-renyi:40:0.0001:0: no connected graph turned up; raise the
plan erdos-renyi:16:0.3:x => 'erdos-renyi:16:0.3:x' is not of the form erdos-renyi:WORKERS:PR
plan erdos-renyi:16:0.3:-1 => erdos-renyi:16:0.3:-1: the seed is -1, but it is a whole number
plan geometric:16:-1 => geometric needs a positive radius, not -1.0.
plan geometric:16:nan => geometric needs a positive radius, not nan.
plan geometric:400:0.001 => geometric:400:0.001:0: no connected graph turned up; raise the d
plan paper:er9 => unknown paper graph 'er9': did you mean 'er8'?
plan paper => 'paper' is not of the form paper:NAME.
plan missing.json => there is no topology file 'missing.json'.
plan folder => there is no topology file 'folder'.
plan pair.json => 'pair.json': link (0, [1]) names a worker [1], which is not a name.
plan null.json => 'null.json': link (0, None) names a worker None, which is not a nam
plan empty.json => 'empty.json': a topology needs at least 2 workers, but this one
plan loop.json => 'loop.json': worker 0 has a link to itself: remove the self-loop
plan twice.json => 'twice.json': link (0, 1) is given twice: keep one.
plan apart.json => 'apart.json': the graph is not connected: no path joins worker 0
plan some.json => 'some.json': 1 of 2 links have a time and link (1, 2) has none:
plan huge.json => 'huge.json': link (0, 1) has time 1e+308: link times are positiv
plan neg.json => 'neg.json': link (0, 1) has time -1.0: link times are positive s
plan nan.json => 'nan.json': link (0, 1) has time nan: link times are positive se
plan broken.json => 'broken.json' could not be read as json: Expecting ',' delimiter
plan object.json => 'object.json': it is neither a list of links nor an object with
plan string.json => 'string.json': it is neither a list of links nor an object with
plan number.json => 'number.json': it is neither a list of links nor an object with
plan schema.json => 'schema.json': its schema is 'matcha.topology/9', but 'matcha.to
plan weird.json => 'weird.json': its 'num_workers' is 'two', but it is a whole number from 2 up.
plan labels.json => 'labels.json': a link names worker 5, but there are 2 labels.
plan bin.json => 'bin.json' could not be read as json: 'utf-8' codec can't decode
plan weight.graphml => 'weight.graphml': its links carry 'weight', which may mean anyth
plan bad.graphml => 'bad.graphml' could not be read as graphml: unclosed token: line
plan bad.csv => 'bad.csv': the graph is not strongly connected: no path leads fr
plan words.csv => 'words.csv': the graph is not connected: no path joins worker 'a' and
plan rag.csv => 'rag.csv': its rows differ in length: a table is an adjacency
plan bad.edges => 'bad.edges': line 1 is not two workers (and seconds): '0 1 2 3'.
plan some.edges => 'some.edges': 1 of 2 links have a time and link (1, 2) has none:
plan empty.edges => 'empty.edges': a topology needs at least 2 workers, but this one
plan file.docx => 'file.docx' has an unknown ending: topology files end in .json,
plan words.npy => 'words.npy': an adjacency matrix holds numbers, but this one is
plan cube.npy => 'cube.npy': an adjacency matrix is square, but this one is (2, 2
plan obj.npy => 'obj.npy' could not be read as npy: Object arrays cannot be load
plan text.npy => 'text.npy' could not be read as npy: This file contains pickled
plan plan.json => 'plan.json' is not a usable plan: it lacks 'topology'.
plan planx.json => 'planx.json' is not a usable plan: its schema is 'matcha.plan/99
plan plandamaged.json => 'plandamaged.json' is damaged: its checksum does not match its c
plan ring:8 --budget 0 => the budget is 0.0, but it is a fraction of vanilla's communicati
plan ring:8 --budget -1 => the budget is -1.0, but it is a fraction of vanilla's communicat
plan ring:8 --budget 2 => the budget is 2.0, but it is a fraction of vanilla's communicati
plan ring:8 --budget nan => the budget is nan, but it is a fraction of vanilla's communicati
plan ring:8 --budget inf => the budget is inf, but it is a fraction of vanilla's communicati
plan ring:8 --budget half => --budget takes a number.
plan ring:8 --strategy macha => unknown strategy 'macha': did you mean 'matcha'?
plan ring:8 --strategy '' => unknown strategy ''
plan ring:8 --seed x => --seed takes a whole number.
plan ring:8 --seed -1 => the seed is -1, but it is a whole number from 0 up, below 2^128.
plan ring:8 --mixing circular => unknown mixing 'circular'
plan ring:8 --strategy greedy --mixing laplacian => the greedy strategy has pairwise or push mixing, not laplacian
plan ring:8 --matchings missing.json => 'missing.json' cannot be read: No such file or directory.
plan ring:8 --matchings authors => --matchings authors goes with a graph of the paper, as paper:er8
plan ring:8 --matchings matchings.json => matching 0 uses worker 1 twice: links of a matching share no wor
plan ring:8 --matchings matchings2.json => matchings are lists of pairs of worker numbers, [[(i, j), …], …]
plan ring:8 --matchings matchings3.json => matchings are lists of pairs of worker numbers, [[(i, j), …], …]
plan ring:8 --matchings notjson.json => 'notjson.json' is not JSON: matchings are [[[i, j], …], …].
plan ring:8 --matchings folder => 'folder' cannot be read: Is a directory.
plan ring:8 -s matcha --decomposition triangles => unknown decomposition 'triangles': did you mean 'matchings'?
plan ring:8 --effort maximal => unknown effort 'maximal'
plan ring:8 --delay-exponent 0 => --delay-exponent is 0.0, but t(n) = n^G must increase: G > 0.
plan ring:8 --delay-exponent nan => --delay-exponent is nan, but t(n) = n^G must increase: G > 0.
plan ring:8 --delay-exponent 1e9 => --delay-exponent is 1000000000.0: n^G is beyond all numbers.
plan ring:8 --stage 100 => --stage is '100', but it is ITERATION:BUDGET, such as 1000:0.1.
plan ring:8 --stage 0:0.5 => a --stage starts at iteration 1 or later; --budget is what it en
plan ring:8 --stage a:b => --stage is 'a:b', but it is ITERATION:BUDGET, such as 1000:0.1.
plan ring:8 --stage 100:2 => the budget is 2.0, but it is a fraction of vanilla's communicati
plan ring:8 --stage 100:0.1 --stage 100:0.2 => two stages start at iteration 100.
plan ring:8 --stage 100:0.1 --plot x.svg => --plot draws one plan, and --stage makes several.
plan ring:8 --output afile => 'afile' exists: choose another name, or --force to overwrite it.
plan ring:8 --output folder => 'folder' is a folder: give the name of a file.
plan ring:8 --output afile/x.json => cannot write 'afile/x.json': a file stands where its folder shou
plan ring:8 --output /proc/x.json => cannot write '/proc/x.json': No such file or directory; choose a
plan ring:8 --output /dev/full/x.json => cannot write '/dev/full/x.json': a file stands where its folder
plan ring:8 --plot x.doc => cannot draw 'x.doc': figures end in .png, .svg, .pdf.
plan ring:8 --plot folder/../afile => 'folder/../afile' exists: choose another name, or --force to ove
plan ring:8 --plot /proc/x.png => cannot write '/proc/x.png': No such file or directory; choose an
plan ring:8 --nonsense => there is no option --nonsense. (`matcha plan --help` says
plan ring:8 --budgett 1 => there is no option --budgett: did you mean --budget? (`matcha
plan ring:8 extra => unexpected extra argument
sweep ring:8 --budget 0 => the budget is 0.0, but it is a fraction of vanilla's communicati
sweep ring:8 --budget 0.1,x => --budget is '0.1,x', but it is numbers separated by commas.
sweep ring:8 --budget , => a sweep needs at least one budget, one strategy and one wire.
sweep ring:8 --wire modulo:9 => a modulo wire has 8, 4, 3, 2 bits, not 9
sweep ring:8 --wire fax => unknown wire 'fax'
sweep ring:8 --strategy nothing => unknown strategy 'nothing': did you mean 'single'?
sweep ring:8 --plot x.doc => cannot draw 'x.doc': figures end in .png, .svg, .pdf.
sweep ring:8 --plot /proc/x.svg => cannot write '/proc/x.svg': No such file or directory; choose an
sweep missing.json => there is no topology file 'missing.json'.
tune ring:8 => --compute-time is missing.
tune ring:8 --compute-time -1 => the compute time is -1.0, but it is positive seconds.
tune ring:8 --compute-time nan => the compute time is nan, but it is positive seconds.
tune ring:8 --compute-time 0.1 --link-time -1 => the link time is -1.0, but it is positive seconds.
tune ring:8 --compute-time 0.1 --link-time nan => the link time is nan, but it is positive seconds.
tune ring:8 --compute-time 0.1 --link-time 0.1 --latency 0.1 => the latency is 0.1, but it is a part of the link time, 0.1 secon
tune ring:8 --compute-time 0.1 --link-time 0.1 --latency nan => the latency is nan, but it is a part of the link time, 0.1 secon
tune ring:8 --compute-time 0.1 --link-time 0.1 --wire lowrank:0 => a low-rank wire has a rank from 1 to 64, not 0
tune ring:8 --compute-time 0.1 --link-time 0.1 --wire , => tuning needs a strategy, a budget, a wire and at least one trial.
tune ring:8 --compute-time 0.1 --link-time 0.1 --outer 0.7 => --outer '0.7' is not RATE/MOMENTUM, such as 0.7/0.5, or none.
tune ring:8 --compute-time 0.1 --link-time 0.1 --outer 0.7/0.5 => theory knows nothing of outer steps
tune ring:8 --compute-time 0.1 --link-time 0.1 --rate-factor x => --rate-factor is 'x', but it is numbers separated by commas.
tune ring:8 --compute-time 0.1 --link-time 0.1 --epochs 3 => --epochs is for trials: say what to train with --task.
tune ring:8 --compute-time 0.1 --link-time 0.1 --task nothing => unknown task 'nothing'
tune ring:8 --compute-time 0.1 --link-time 0.1 --target-gap 0 => target_gap is 0.0, but it must be positive.
tune ring:8 --compute-time 0.1 --link-time 0.1 --target-gap 2 => the target is no better than the start: lower it.
tune ring:8 --compute-time 0.1 --link-time 0.1 --smoothness -1 => smoothness is -1.0, but it must be positive.
tune ring:8 --compute-time 0.1 --link-time 0.1 --gradient-variance nan => gradient_variance is nan, but it is at least 0.
tune ring:8 --compute-time 0.1 --link-time 0.1 --page x.pdf => 'x.pdf' would be a page for a browser: end it in .html.
tune ring:8 --compute-time 0.1 --link-time 0.1 --budget 7 => the budget is 7.0, but it is a fraction of vanilla's communicati
tune ring:8 --compute-time 0.1 --link-time 0.1 --strategy magic => unknown strategy 'magic': did you mean 'matcha'?
tune ring:8 --compute-time 0.1 --link-time 0.1 --output /proc/x.json => cannot write '/proc/x.json': No such file or directory; choose a
simulate ring:8 --epochs 0 => epochs must be 1 or more, not 0
simulate ring:8 --epochs -1 => epochs must be 1 or more, not -1
simulate ring:8 --lr 0 => the learning rate must be above 0, not 0.0
simulate ring:8 --lr -1 => the learning rate must be above 0, not -1.0
simulate ring:8 --lr nan => the learning rate must be above 0, not nan
simulate ring:8 --lr inf -s vanilla => the learning rate must be above 0, not inf
simulate ring:8 --batch-size 0 => batch_size must be 1 or more, not 0
simulate ring:8 --batch-size 100000 => a batch of 100,000 is larger than the whole training set of 1,49
simulate ring:8 --model nothing => unknown model 'nothing': did you mean 'cnn-gn'?
simulate ring:8 --optimizer magic => unknown optimizer 'magic'
simulate ring:8 --model '' => unknown model ''
simulate ring:8 --optimizer '' => unknown optimizer ''
simulate ring:8 --clip 0 => clip is 0.0, but it is a positive number, such as 1.
simulate ring:8 --partition fair => partition must be one of iid, shards, dirichlet, dirichlet-even, not 'fair'
simulate ring:8 --partition dirichlet --concentration 0 => the Dirichlet concentration must be above 0, not 0.0
simulate ring:8 --partition dirichlet --concentration nan => the Dirichlet concentration must be above 0, not nan
simulate ring:8 --num-train 0 => num_train must be 1 or more, not 0
simulate ring:8 --num-train 3 => 3 examples cannot be shared among 8 workers
simulate ring:8 --num-test 0 => num_test must be 1 or more, not 0
simulate ring:8 --task cifar10 --data folder => CIFAR-10 is not in 'folder': unpack cifar-10-batches-bin (binary
simulate ring:8 --task cifar10 --data missing => the data folder 'missing' does not exist
simulate ring:8 --task ptb --partition shards => the task ptb has no choice of partition, but got 'shards'
simulate ring:8 --device tpu => device must be cpu or cuda, not 'tpu'
simulate ring:8 --precision float7 => precision must be one of float32, float64, bfloat16, not 'float7
simulate ring:8 --streams 0 => streams must be 1 or more, not 0
simulate ring:8 --evaluate-every 0 => epochs and evaluate_every must be 1 or more, not 20 and 0
simulate ring:8 --statistics none => statistics must be recalibrated or averaged: 'none'
simulate ring:8 --compute-time -1 => compute_time must be a number of seconds, not -1.0
simulate ring:8 --compute-time nan => compute_time must be a number of seconds, not nan
simulate ring:8 --link-time -1 => link_time must be a number of seconds, not -1.0
simulate ring:8 --plan missing.json => 'missing.json' cannot be read: No such file or directory.
simulate ring:8 --plan plan.json => 'plan.json' is not a usable plan: it lacks 'topology'.
simulate ring:8 --figures doc => there is no option --figures.
simulate ring:8 --output afile => cannot write 'afile': a file stands where its folder should be
simulate ring:8 --output /proc/x => cannot write '/proc/x': No such file or directory; choose
simulate ring:8 --strategy magic => unknown strategy 'magic': did you mean 'matcha'?
simulate ring:8 --budget 0 => the budget is 0.0, but it is a fraction of vanilla's communicati
report missing => 'missing' holds no run (no run.json there or below).
report folder => 'folder' holds no run (no run.json there or below).
report run => 'run' holds a run of another version than 'matcha.run/2': run it again.
report run2 => the run.json in 'run2' is damaged: it lacks a field.
report run3 => 'run3' does not hold a run (no readable run.json).
report plan.json => 'plan.json' is not a usable plan: it lacks 'topology'.
report missing.json => 'missing.json' cannot be read: No such file or directory.
report folder --format doc => unknown format 'doc'
report run --target-loss nan => --target-loss is nan, but it must be a number.
report afile => 'afile' holds no run (no run.json there or below).
train digits --topology ring:4 --strategy vanilla --replan 5 => so it cannot follow the network: leave replan out, or use greedy, matcha, periodic
train nothing => unknown task 'nothing'
train missing.py => there is no script 'missing.py'.
train digits --hosts 0 => --hosts is 0, but at least this machine takes part.
train digits --hosts 2 => several machines need both --hosts and --rendezvous HOST:PORT.
train digits --hosts 2 --rendezvous nowhere => --rendezvous is 'nowhere', but it is HOST:PORT.
train digits --hosts 2 --rendezvous a:b => --rendezvous is 'a:b', but it is HOST:PORT.
train digits --hosts 2 --rendezvous a:1 --host-rank 5 => --host-rank is 5, but it is 0 to 1.
train digits --budget 7 => the budget is 7.0, but it is a fraction of vanilla's communicati
train digits --strategy magic => unknown strategy 'magic': did you mean 'matcha'?
train digits --topology nothing => unknown topology family 'nothing': did you mean 'ring'?
train digits --plan missing.json => 'missing.json' cannot be read: No such file or directory.
train digits --resume => --resume needs --output: the directory of the run to go on with.
train digits --resume --output missing => 'missing' holds no run to go on with: leave --resume out
train digits --resume --output missing --topology nothing => 'missing' holds no run to go on with
train digits --topology nothing --lr nan => the learning rate must be above 0, not nan
train logistic --topology nothing --momentum quasi-global => quasi-global momentum needs SGD with momentum
train digits --plan plan.json --budget 0.3 --strategy greedy => --strategy and --budget are for planning
train digits --restarts 3 => --restarts is for --elastic
train digits --watch --hosts 2 --rendezvous a:1 => --watch is for one machine
train digits --wire float7 => unknown wire 'float7': did you mean 'float32'?
train digits --momentum quasi => unknown momentum 'quasi': did you mean 'quasi-global'?
simulate --seed 0,one => --seed is '0,one', but it is whole numbers separated by commas.
simulate --seed 0,0 => --seed is '0,0': name each choice once.
simulate --resume --output missing => 'missing' holds no run to go on with: leave --resume out
simulate nothing --task logistic --momentum quasi-global => quasi-global momentum needs SGD with momentum, or Adam
simulate --wire modulo:5 => a modulo wire has 8, 4, 3, 2 bits, not 5
simulate --momentum quasi => unknown momentum 'quasi': did you mean 'quasi-global'?
train digits extra arguments => a task takes no arguments of its own: 'extra arguments'.
probe ring:4 => --output is missing.
probe ring:4 -o afile => 'afile' exists: choose another name, or --force to overwrite it.
probe ring:4 -o x.json --message-mb 0 => --message-mb is 0.0, but it must be positive, up to 100000.
probe ring:4 -o x.json --message-mb nan => --message-mb is nan, but it must be positive, up to 100000.
probe ring:4 -o x.json --repetitions 0 => --repetitions is 0, but it must be 1 or more.
probe ring:4 -o /proc/x.json => cannot write '/proc/x.json': No such file or directory; choose a
probe nothing -o x.json => unknown topology family 'nothing': did you mean 'ring'?
demo --link-mbps 0 => link_mbps must be positive, not 0.
demo --link-mbps nan => link_mbps must be positive, not nan.
demo --budget 0 => the budget is 0.0, but it is a fraction of vanilla's communicati
demo --target-loss -1 => target_loss must be positive, not -1.
demo --time-limit 0 => seconds must be positive, not 0.
demo --topology nothing => unknown topology family 'nothing': did you mean 'ring'?
demo --strategy magic => unknown strategy 'magic': did you mean 'matcha'?
demo --strategy '' => the demo needs at least one strategy.
demo --output folder/../run => 'folder/../run' is not empty: choose another --output.
bench nothing => unknown benchmark 'nothing'
watch missing => 'missing' holds no run (no run.json there or below).
watch folder => 'folder' holds no run (no run.json there or below).
watch folder --refresh 0 => --refresh: input should be
watch run3 --once => 'run3' does not hold a run (no readable run.json).
nonsense => no such command 'nonsense'.
tune ring:8 --compute-time 0.1 --link-time 0.1 --page folder => 'folder' is a folder: give the name of a file.
report run --output folder => 'run' holds a run of another version than 'matcha.run/2': run it again.
report plan.json --output /proc/x.html => 'plan.json' is not a usable plan: it lacks 'topology'.
report plan.json --output x.pdf => 'plan.json' is not a usable plan: it lacks 'topology'.
plan ring:8 --output afile --force --plot /proc/x.svg => cannot write '/proc/x.svg': No such file or directory; choose an
sweep ring:8 --effort lots => unknown effort 'lots'
sweep => TOPOLOGY is missing.
train => SCRIPT|TASK is missing.
demo --strategy greedy,magic => unknown strategy 'magic': did you mean 'matcha'?
simulate nothing => unknown topology family 'nothing': did you mean 'ring'?
simulate ring:8 --seed -1 => the seed is -1, but it is a whole number from 0 up, below 2^128.
train digits --seed -1 => the seed is -1, but it is a whole number from 0 up, below 2^128.
train digits --epochs 0 => epochs must be 1 or more, not 0
train digits --lr nan => the learning rate must be above 0, not nan
train digits --batch-size 0 => batch_size must be 1 or more, not 0
train digits --link-mbps 0 => the links' speed must be positive, not 0.0 Mbit/s.
train digits --timeout 0 => the timeout is 0.0, but it must be positive seconds.
train digits --output afile => cannot write 'afile': a file stands where its folder should be
train digits --output /proc/x => cannot write '/proc/x': No such file or directory; choose
train digits --partition fair => partition must be one of iid, shards, dirichlet, dirichlet-even, not 'fair'
train digits --checkpoint-every -1 => checkpoint_every is -1, but it is 0 or more epochs.
train digits --target-loss nan => the target loss must be a number, not nan
demo --output afile => cannot write 'afile': a file stands where its folder should be
demo --output /proc/x => cannot write '/proc/x': No such file or directory; choose
plan bom.json => 'bom.json': the graph is not connected
plan gap.csv => 'gap.csv': it is empty: a table has a row for each worker, or for each link.
plan true.json => 'true.json': link (True, False) names a worker True, which is not a name.
plan deep.json => 'deep.json' could not be read as json: maximum recursion depth exceeded
plan many.json => 'many.json': 1,000,000,000 workers need at least 999,999,999 links
plan fewer.json => 'fewer.json': its 'num_workers' is -3, but it is a whole number from 2 up.
plan times.json => 'times.json': its 'link_times' is 5, but it is a list of numbers.
plan none.json => 'none.json': its 'link_times' is [None], but it is a list of numbers.
plan vast.json => 'vast.json' could not be read as json: int too large
plan points.json => 'points.json': its 'positions' is [[0], [1]], but it is a list of pairs [x, y].
plan oneway.json => 'oneway.json': its 'directed' is 'yes', but it is true or false.
plan names.json => 'names.json': its 'labels' is [{}, {}], but it is a list of names.
plan hand.json => 'hand.json': a link names 'c', which is not among its nodes.
plan several.json => 'several.json': the graph is a multigraph
plan inf.csv => 'inf.csv': an adjacency matrix has no negative, infinite or missing (NaN) entries.
plan wide.csv => 'wide.csv': link (0, 1) is given twice: keep one.
plan fast.edges => 'fast.edges' could not be read as edges: could not convert string to float: 'fast'
plan mixed.edges => 'mixed.edges': line 2 differs: write a -> b on every line, or on none.
plan page.graphml => 'page.graphml' could not be read as graphml
plan '' => there is no topology file
plan / => there is no topology file '/'.
plan ' ' => unknown topology family ' '
plan RING:8 => unknown topology family 'RING'
plan ring:8.0 => 'ring:8.0' is not of the form ring:WORKERS.
plan torus:3x3x3 => 'torus:3x3x3' is not of the form torus:ROWSxCOLUMNS.
plan erdos-renyi:16:0,3 => 'erdos-renyi:16:0,3' is not of the form
plan paper:er8:x => 'paper:er8:x' is not of the form paper:NAME.
plan star:200000 => 200,000 workers, one of which has about 199,999 neighbours, take 320 GB
plan geometric:2000000:1e308 => geometric:2000000:1e+308:0 would have about 2e+12 links
plan ring:8 --budget '' => --budget takes a number.
plan ring:8 --budget 1e-9 --strategy greedy => at this budget the plan repeats after
plan ring:8 --budget 1e-300 --strategy local => at this budget the plan repeats after about 1e
plan hypercube:3 --budget 1e-9 --strategy hypercube => at this budget the plan repeats after
plan ring:8 --output '' => '.' is a folder: give the name of a file.
plan ring:8 --stage 10:nan => the budget is nan, but it is a fraction
plan ring:8 --stage 1e3:0.1 => --stage is '1e3:0.1', but it is ITERATION:BUDGET
plan ring:8 --matchings deep.json => 'deep.json' is not JSON: matchings are [[[i, j], …], …].
plan ring:8 --matchings '' => '' cannot be read: Is a directory.
plan ring:8 --wire '' => unknown wire ''
plan ring:8 --delay-exponent inf => t(n) must be finite and not negative.
sweep ring:8 --strategy '' => a sweep needs at least one budget, one strategy and one wire.
tune ring:8 --compute-time inf --link-time 0.1 => the compute time is inf, but it is positive seconds.
tune ring:8 --compute-time 0.1 --link-time 1e308 => the link time is 1e+308, but it is positive seconds.
tune ring:8 --compute-time 0.1 --link-time 0.1 --initial-gap inf => initial_gap is inf, but it must be positive.
tune ring:8 --compute-time 0.1 --link-time 0.1 --dissimilarity inf => dissimilarity is inf, but it is at least 0.
tune ring:8 --compute-time 0.1 --link-time 0.1 --task digits --target-loss nan => the target loss is nan, but it is above 0.
tune ring:8 --compute-time 0.1 --link-time 0.1 --task digits --epochs 1 => a target is what exact averaging holds in two epochs
probe ring:3 -o x.json --message-mb 1e-320 => --message-mb is 1e-320, but it must be positive, up to 100000.
probe ring:3 -o x.json --timeout 0 => the timeout is 0.0, but it must be positive seconds.
probe ring:3 -o x.json --timeout nan => the timeout is nan, but it must be positive seconds.
demo --target-loss inf => target_loss must be positive, not inf.
demo --link-mbps inf => link_mbps must be positive, not inf.
train digits --link-mbps inf => the links' speed must be positive, not inf Mbit/s.
train digits --peers missing --rank 0 => the peers file 'missing' cannot be read: No such file or directory.
simulate ring:4 --strategy , => simulating needs at least one strategy and one budget.
simulate ring:4 --budget , => simulating needs at least one strategy and one budget.
simulate ring:4 --seed 99999999999999999999999 => the seed is 99999999999999999999999, but PyTorch takes
simulate ring:4 --compute-time 1e308 => compute_time is 1e+308, but it is at most 1e+09 seconds
simulate ring:4 --link-time inf => link_time must be a number of seconds, not inf
simulate ring:4 --events events.json => 'events.json' does not hold a list of events.
simulate ring:4 --events deep.json => 'deep.json' is not JSON: it is a list of events.
simulate ring:4 --events folder => 'folder' cannot be read: Is a directory.
simulate ring:4 --speeds 1,2 => there are 2 speeds for 4 workers: give each one.
simulate ring:4 --speeds nan,1,1,1 => speeds must be above 0, not nan, 1.0, 1.0, 1.0
simulate ring:4 --clip nan => clip is nan, but it is a positive number, such as 1.
simulate ring:4 --plan folder => 'folder' cannot be read: Is a directory.
simulate ring:4 --task '' => unknown task ''
"""
ROWS = [line.split(" => ") for line in TABLE.strip().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder full of files that no command can use."""
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    (root / "folder").mkdir()
    (root / "bin.json").write_bytes(bytes(range(256)))
    np.save(root / "words.npy", np.array([["0", "1"], ["1", "0"]]))
    np.save(root / "cube.npy", np.zeros((2, 2, 2)))
    np.save(root / "obj.npy", np.array([None], dtype=object))
    return root


def test_the_table_is_long_enough():
    assert len(ROWS) >= 150
    assert len({command for command, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("command", "words"), ROWS, ids=[command for command, _ in ROWS])
def test_bad_input_is_one_sentence(command, words, place):
    before = sorted(place.rglob("*"))
    done = matcha_command(*shlex.split(command), cwd=place)
    said = done.stderr
    assert done.returncode == 2
    assert words in said
    assert "Traceback" not in said
    assert said.startswith("matcha: ")
    assert len(said.strip().splitlines()) == 1
    assert sorted(place.rglob("*")) == before, "it left something behind"
