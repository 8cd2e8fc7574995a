package apiserver

import (
	"context"
	"log/slog"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// RedirectLogs makes client-go log to log. It affects the whole process; call it once, before anything else in this package.
func RedirectLogs(log *slog.Logger) { klog.SetSlogLogger(log.With("from", "client-go")) }

// quietly returns a context in which client-go logs at level debug, whatever the level of its records: this package reports
// failures itself, once each and not for each attempt.
func quietly(ctx context.Context, log *slog.Logger) context.Context {
	return klog.NewContext(ctx, logr.FromSlogHandler(demoted{log.Handler()}))
}

// demoted passes records on at level debug, except those of lower levels, such as the bodies of requests.
type demoted struct{ slog.Handler }

func (d demoted) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelDebug && d.Handler.Enabled(ctx, slog.LevelDebug)
}

func (d demoted) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	return d.Handler.Handle(ctx, r)
}

func (d demoted) WithAttrs(attrs []slog.Attr) slog.Handler {
	return demoted{d.Handler.WithAttrs(attrs)}
}

func (d demoted) WithGroup(name string) slog.Handler { return demoted{d.Handler.WithGroup(name)} }
