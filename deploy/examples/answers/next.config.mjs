const backend = process.env.BACKEND ?? "http://127.0.0.1:8000";

export default {
  rewrites: async () => [{ source: "/api/:path*", destination: `${backend}/api/:path*` }],
};
