package inspect

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"nodeproxy/plan"
	"nodeproxy/proxier"
)

// A History keeps mostSyncs syncs, which name mostNamed Services in all, and of each text its first mostText bytes. That is at most
// about one megabyte, however large and frequent syncs are: 64 bytes a Service and its name, 1 KB a sync and its texts.
const (
	mostSyncs = 256
	mostNamed = 16 * proxier.MostNamed
	mostText  = 512
)

// ConfigChanged is why a sync was made that is the first one of a new configuration.
const ConfigChanged proxier.Reason = "config"

// Sync is what one sync did, or several in a row that found nothing to do.
type Sync struct {
	// Number counts syncs from the start of the process; of several in a row it is the last one's.
	Number uint64 `json:"number"`
	// Began is when it began. Where Repeated others followed that found nothing to do either, Last is when the last of them began.
	Began    time.Time        `json:"began"`
	Last     time.Time        `json:"last,omitzero"`
	Repeated int              `json:"repeated,omitempty"`
	Reasons  []proxier.Reason `json:"reasons"`
	// Suspicion is the sign of a change by another program that led to it.
	Suspicion string `json:"suspicion,omitempty"`
	// Everything is true if all that is in the kernel was compared, rather than only what had changed.
	Everything bool `json:"everything"`
	// In are the objects that had come.
	In           proxier.Input `json:"in"`
	ServicePorts Counts        `json:"servicePorts"`
	Endpoints    Counts        `json:"endpoints"`
	// Services are those that changed, in order, and OtherServices counts those that are not named.
	Services      []ServiceChange `json:"services"`
	OtherServices int             `json:"otherServices,omitempty"`
	// Written is how many things were written or removed, by kind, such as rule, set_element or virtual_server.
	Written map[string]int `json:"written,omitempty"`
	Took    Stages         `json:"took"`
	// Waiting is the number of changed ServicePorts that are left to later syncs.
	Waiting int `json:"waiting,omitempty"`
	// Drift is the number of things that another program had changed, and DriftDetail names the first of them.
	Drift       int    `json:"drift,omitempty"`
	DriftDetail string `json:"driftDetail,omitempty"`
	// Error is the text of what failed; empty if nothing did.
	Error string `json:"error,omitempty"`
}

// Counts are numbers of things that are new, differ, or are gone.
type Counts struct {
	Added   int `json:"added,omitempty"`
	Changed int `json:"changed,omitempty"`
	Removed int `json:"removed,omitempty"`
}

// ServiceChange is how one Service changed.
type ServiceChange struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Change is one of added, changed and removed.
	Change           string `json:"change"`
	Ports            int    `json:"ports"`
	EndpointsAdded   int    `json:"endpointsAdded,omitempty"`
	EndpointsRemoved int    `json:"endpointsRemoved,omitempty"`
}

// Stages are how long the parts of a sync took, in seconds: Wait from the arrival of the oldest change to the begin, Plan to find out
// what must be, Write to bring the kernel to it, and Compare to find that there was nothing to write.
type Stages struct {
	Wait    float64 `json:"waitSeconds"`
	Plan    float64 `json:"planSeconds"`
	Write   float64 `json:"writeSeconds"`
	Compare float64 `json:"compareSeconds"`
}

// Total is how long a sync took, without the wait.
func (s Stages) Total() float64 { return s.Plan + s.Write + s.Compare }

// NewSync returns the record of a sync with this result. written counts what the backend has written, by kind.
func NewSync(change plan.Change, r proxier.Result, written map[string]int) Sync {
	s := Sync{
		Began: r.Began, Reasons: r.Reasons, Suspicion: cut(r.Suspicion), Everything: change.All(), In: r.In, Waiting: r.Waiting, Written: written,
		ServicePorts: Counts{r.Difference.Added, r.Difference.Changed, r.Difference.Removed},
		Endpoints:    Counts{Added: r.Difference.EndpointsAdded, Removed: r.Difference.EndpointsRemoved},
		Services:     []ServiceChange{}, OtherServices: r.Difference.Others,
		Took: Stages{Wait: r.Waited.Seconds(), Plan: (r.Apply + r.Plan).Seconds(), Write: r.Backend.Seconds()},
	}
	if change.All() && len(written) == 0 && r.Err == nil {
		s.Took.Compare, s.Took.Write = s.Took.Write, 0
	}
	if r.Err != nil {
		s.Error = cut(r.Err.Error())
	}
	for _, d := range r.Difference.Services {
		c := ServiceChange{d.Service.Namespace, d.Service.Name, "changed", d.Ports, d.EndpointsAdded, d.EndpointsRemoved}
		if d.Added {
			c.Change = "added"
		} else if d.Removed {
			c.Change = "removed"
		}
		s.Services = append(s.Services, c)
	}
	return s
}

func cut(text string) string {
	if len(text) > mostText {
		return strings.ToValidUTF8(text[:mostText], "") + "…"
	}
	return text
}

// Trivial reports whether a sync found nothing to do.
func (s *Sync) Trivial() bool {
	return len(s.Services) == 0 && len(s.Written) == 0 && s.Drift == 0 && s.Error == "" && s.Waiting == 0 && s.Number > 1
}

// History keeps the last syncs. Its zero value has none. It is safe for concurrent use.
type History struct {
	mu     sync.Mutex
	syncs  []Sync // the oldest first
	named  int    // Services of all of them
	number uint64
	drift  int
	detail string
	// good is when the first sync ended since which none has failed, or left something to the next one; zero if the last one did.
	good time.Time
}

// Drifted records that things in the kernel were not as they had been written, for the sync or comparison that Add records next.
func (h *History) Drifted(things int, detail string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drift += things
	if h.detail == "" {
		h.detail = cut(detail)
	}
}

// Add appends a sync, and forgets the oldest ones.
func (h *History) Add(s Sync) Sync {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.number++; h.number > 1 && slices.Contains(s.Reasons, proxier.Start) {
		s.Reasons = []proxier.Reason{ConfigChanged}
	}
	switch {
	case s.Error != "" || s.Waiting > 0:
		h.good = time.Time{}
	case h.good.IsZero() && !s.beside():
		h.good = time.Now()
	}
	s.Number, s.Drift, s.DriftDetail = h.number, h.drift, h.detail
	h.drift, h.detail = 0, ""
	if n := len(h.syncs); n > 0 && s.Trivial() && h.syncs[n-1].Trivial() && slices.Equal(s.Reasons, h.syncs[n-1].Reasons) {
		h.syncs[n-1].repeat(s)
		return s
	}
	h.syncs = append(h.syncs, s)
	h.named += len(s.Services)
	drop := 0
	for len(h.syncs)-drop > mostSyncs || h.named > mostNamed {
		h.named -= len(h.syncs[drop].Services)
		drop++
	}
	h.syncs = slices.Delete(h.syncs, 0, drop)
	return s
}

// repeat adds another sync that found nothing to do either.
func (s *Sync) repeat(next Sync) {
	s.Number, s.Last, s.Repeated = next.Number, next.Began, s.Repeated+1
	s.In.Add(next.In)
	s.Took, s.Suspicion, s.Everything = next.Took, next.Suspicion, next.Everything
}

// beside reports whether it is a comparison, which is no sync.
func (s *Sync) beside() bool { return s.Took.Plan == 0 && s.Took.Write == 0 }

// inSyncSince returns since when no sync has failed or left something to the next one; zero if the last one did.
func (h *History) inSyncSince() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.good
}

// Syncs returns the syncs that are kept, the oldest first; never nil.
func (h *History) Syncs() []Sync {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]Sync{}, h.syncs...)
}

// Of returns the syncs that changed a Service, with what each did to it alone. Where a sync changed so many that not all are named,
// and it may be among the others, its list of Services is empty.
func (h *History) Of(svc plan.Service) []Sync {
	out := []Sync{}
	for _, s := range h.Syncs() {
		total := len(s.Services) + s.OtherServices
		i, found := slices.BinarySearchFunc(s.Services, svc, func(c ServiceChange, svc plan.Service) int { return c.service().Compare(svc) })
		switch {
		case found:
			s.Services, s.OtherServices = s.Services[i:i+1], total-1
		case i == len(s.Services) && s.OtherServices > 0:
			s.Services, s.OtherServices = []ServiceChange{}, total
		default:
			continue
		}
		out = append(out, s)
	}
	return out
}

func (c ServiceChange) service() plan.Service {
	return plan.Service{Namespace: c.Namespace, Name: c.Name}
}

// WriteHistory writes a row for each sync; wide adds the stages and what was written. Ages are as of now.
func WriteHistory(w io.Writer, list []Sync, wide bool, now time.Time) error {
	header := either(wide, "TIME WHY CAME-IN SERVICES ENDPOINTS WAIT PLAN WRITE COMPARE WRITTEN RESULT", "AGE WHY CAME-IN SERVICES ENDPOINTS TOOK RESULT")
	var rows [][]string
	for _, s := range list {
		few := 3
		if wide {
			few = 10
		}
		row := []string{since(s.latest(), now), s.why(), inputText(s.In), s.servicesText(few), s.Endpoints.text()}
		if wide {
			row[0] = s.latest().Format(time.RFC3339)
			for _, t := range []float64{s.Took.Wait, s.Took.Plan, s.Took.Write, s.Took.Compare} {
				row = append(row, seconds(t))
			}
			row = append(row, writtenText(s.Written))
		} else {
			row = append(row, seconds(s.Took.Total()))
		}
		rows = append(rows, append(row, s.result()))
	}
	return Table(w, header, rows)
}

func (s *Sync) latest() time.Time { return cmp.Or(s.Last, s.Began) }

func (s *Sync) why() string {
	return strings.Join(words(s.Reasons, func(r proxier.Reason) string { return string(r) }), ",")
}

func inputText(in proxier.Input) string {
	part := func(n int, noun string) string { return when(n > 0, counted(n, noun)) }
	return joined(", ", part(in.Services, "Service"), part(in.EndpointSlices, "EndpointSlice"), part(in.Nodes, "Node"),
		part(in.ServiceCIDRs, "ServiceCIDR"), when(in.Gone > 0, fmt.Sprintf("%d gone", in.Gone)))
}

// servicesText names the first few Services, and counts the others: "default/web (new), default/db and 7 more".
func (s *Sync) servicesText(few int) string {
	var names []string
	for _, c := range s.Services[:min(few, len(s.Services))] {
		name := c.service().String()
		switch c.Change {
		case "added":
			name += " (new)"
		case "removed":
			name += " (gone)"
		}
		names = append(names, name)
	}
	text := strings.Join(names, ", ")
	switch more := len(s.Services) - len(names) + s.OtherServices; {
	case more > 0 && text == "":
		text = fmt.Sprintf("%d Services", more)
	case more > 0:
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// text is as in "+2/-1".
func (c Counts) text() string {
	return when(c.Added != 0 || c.Removed != 0, fmt.Sprintf("+%d/-%d", c.Added, c.Removed))
}

func seconds(s float64) string {
	if s == 0 {
		return ""
	}
	d := time.Duration(s * float64(time.Second))
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(100 * time.Microsecond).String()
	}
	return d.Round(10 * time.Millisecond).String()
}

func writtenText(kinds map[string]int) string {
	of := func(kind string) string { return counted(kinds[kind], strings.ReplaceAll(kind, "_", " ")) }
	return strings.Join(words(slices.Sorted(maps.Keys(kinds)), of), ", ")
}

// result says how a sync ended.
func (s *Sync) result() string {
	now := either(s.Error != "", "not repaired", "repaired")
	drift := fmt.Sprintf("%s: %s changed by another program: %s", now, counted(s.Drift, "thing"), s.DriftDetail)
	repeated := fmt.Sprintf("nothing to do, %d times since %s", s.Repeated+1, s.Began.Format(time.RFC3339))
	return cmp.Or(joined("; ", with("failed: ", s.Error), either(s.Drift > 0, drift, with("looked because ", s.Suspicion)),
		when(s.Waiting > 0, fmt.Sprintf("%d ServicePorts left to the next sync", s.Waiting)),
		either(s.Repeated > 0, repeated, when(s.Trivial(), "nothing to do"))), "in sync")
}
